"""What memory is: host memory and the words that peers read in it."""
