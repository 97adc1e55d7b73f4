#pragma once

#include <shoestring/core/export.h>

namespace shoestring {

/// Replaces LibTorch's autograd engine by a subclass that has saved-tensor hooks and is otherwise the same.
/// `checkpoint`, `checkpoint_sequential`, `plan_sequential`, `tiled` and `OffloadActivations` need these
/// hooks. LibTorch has them in Python only (torch.autograd.graph.saved_tensors_hooks). The new engine stays
/// until the process ends. Further calls do nothing.
///
/// Call install_autograd_engine once at the start of main(), while no other thread runs a backward pass.
///
/// Throws c10::Error if a backward pass has already run, since LibTorch's engine and the new engine would
/// then have separate threads and queues. Also throws in a process with Python's autograd engine; use
/// Python's functions of the same names there. Example:
///
///     int main() {
///       shoestring::install_autograd_engine();
///       ...
///       at::Tensor y = shoestring::checkpoint(block, x);
///     }
SHOESTRING_API void install_autograd_engine();

}  // namespace shoestring
