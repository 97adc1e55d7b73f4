#pragma once

#include <torch/csrc/autograd/variable.h>

#include "core/autograd.h"

namespace shoestring {

/// Returns whether backward may overwrite the saved tensor t, as only_saved() does, or because t is a view of
/// all elements of a tensor that only this view refers to. PyTorch's linear layers with a bias return such
/// views.
inline bool only_saved_view(const at::Tensor& t) {
  if (only_saved(t)) return true;
  if (is_traced(t) || !t.has_storage() || !t.is_contiguous() || !t.is_view()) return false;
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(t);
  // A view that has one record for both modes of differentiation refers to its base once.
  if (meta == nullptr || !meta->has_bw_view() || !meta->shared_view_info()) return false;
  const at::Tensor& base = meta->get_backward_view().base_;
  // A tensor that Python has seen is also referred to by its Python object.
  const auto alone = [](const at::Tensor& tensor, size_t holders) {
    return tensor.use_count() == holders ||
           (tensor.use_count() == holders + 1 &&
            tensor.unsafeGetTensorImpl()->pyobj_slot()->has_unique_reference());
  };
  return alone(t, 2) && alone(base, 1) && base.numel() == t.numel() && t.storage().use_count() == 2;
}

}  // namespace shoestring
