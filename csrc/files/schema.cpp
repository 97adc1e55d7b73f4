// Declares the operators of csrc/files.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Returns the checksum of what a file with these tensors and this metadata holds
  // (files/content_checksum.h).
  // Saves tensors as save_safetensors of shoestring/files/safetensors.h does. Returns 0, or errno if a system
  // call failed.
  m.def("_save_safetensors(str path, str[] names, Tensor[] tensors, Dict(str, str) metadata) -> int");
  // Averages checkpoints as average_checkpoints of shoestring/files/average_checkpoints.h does. Returns 0, or
  // errno if a system call failed.
  m.def("_average_checkpoints(str[] paths, str out, float[]? weights) -> int");
}
