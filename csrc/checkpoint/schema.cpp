// The schemas of this room's operators. An operator whose name ends in _ changes its arguments in place.

#include <string>

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // x itself. What made it is kept by a checkpoint around it whose `keep` names the tag, so that backward
  // does not make it again; x was not modified in place since.
  m.def("tag_activation(Tensor x, str tag) -> Tensor");
  // The operators that names for a checkpoint's `keep` stand for; tags are left out.
  m.def("checkpoint_operators(str[] keep) -> str[]");
  // What a plan may do with a block's activations: the name, whether it is recomputed, but for the results of
  // which operators, and whether what is saved leaves the device.
  m.def("checkpoint_choices() -> (str[] names, bool[] recomputed, str[][] keep, bool[] offloaded)");
  // For a row of blocks, the choice of each that makes forward and backward quickest within a budget of
  // bytes, by the model in shoestring/checkpoint_plan.h, and the peak and seconds that it predicts; no plan
  // takes less than least_seconds. pending: bytes that may still be on their way when each begins. choices:
  // how many each block has, which bytes and so on list one after the other. simulate: the prediction for a
  // given plan.
  const std::string planned =
      "(float[] forward_seconds, float[] backward_seconds, int[] choices, int[] bytes, float[] "
      "extra_seconds, int[] link_bytes, int[] forward_bytes, int[] backward_bytes, ";
  const std::string linked =
      "*, int budget, float out_bytes_per_second=0., float in_bytes_per_second=0., float copy_share=0., int "
      "prefetch=1) -> ";
  const std::string result = "int[] pending, int peak, float seconds";
  m.def(("checkpoint_plan" + planned + linked + "(int[] plan, " + result + ", float least_seconds)").c_str());
  m.def(("simulate_checkpoint_plan" + planned + "int[] plan, " + linked + "(" + result + ")").c_str());
}
