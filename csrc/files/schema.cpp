// The schemas of the operators in csrc/files. An operator whose name ends in _ changes its arguments in
// place.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Writes a tensor's bytes at the current position of an open file and returns 0 or errno. Pages of the
  // tensor that are mapped from another file are dropped from memory after they are written.
  m.def("write_tensor(int fd, Tensor x) -> int");
}
