// Schemas of the operators in csrc/data.

#include <string>

#include <torch/library.h>

#include "core/arguments.h"
#include "data/mixing.h"

namespace shoestring::data {

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  const std::string signature = c10::str("(", schema_of<MixCall>(), ") -> (", schema_of<MixResult>(), ")");
  // mixup mixes each row of `inputs` with another row of the batch, in the proportion mix to 1 - mix. Returns
  // the mixed inputs, the targets of the other rows, and mix, fp32, of shape () or, with per_row, of
  // target's shape. mix has the distribution Beta(alpha, alpha). It depends on seed, step and row alone.
  m.def(c10::str("mixup", signature).c_str());
  // cutmix replaces a box in each image (rows, ..., height, width) by that of another image. mix is the share
  // of the image that is left.
  m.def(c10::str("cutmix", signature).c_str());
}

}  // namespace shoestring::data
