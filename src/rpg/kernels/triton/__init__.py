"""The kernels on a GPU. Each has a twin in torch, one folder up, that it must agree with."""
