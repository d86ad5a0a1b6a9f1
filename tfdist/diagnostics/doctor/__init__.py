"""`tfdist doctor`: checks of machines, network and files, one module for each thing that is looked at."""
