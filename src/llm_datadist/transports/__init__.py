"""Data movers behind one seam (``seam``): ``local``, ``tcp`` and the reference twin ``inproc``."""
