// Operator schemas of gradient checkpointing and of its planner.

#include <string>

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Returns x itself. A surrounding checkpoint whose `keep` contains the tag stores the results of the
  // operator that made x, so backward does not compute them again. x must not have been modified in place.
  m.def("tag_activation(Tensor x, str tag) -> Tensor");
  // Returns the operators that the names in a checkpoint's `keep` stand for. Tags are left out.
  m.def("checkpoint_operators(str[] keep) -> str[]");
  // Lists the ways in which a plan may treat the activations of a block. Returns their names and whether they
  // recompute the block. Also returns the operators whose results are stored in spite of that, and whether
  // saved tensors leave the device.
  m.def("checkpoint_choices() -> (str[] names, bool[] recomputed, str[][] keep, bool[] offloaded)");
  // For a sequence of blocks, finds the choice for each block that minimises the time of forward and backward
  // within a memory budget in bytes. shoestring/checkpoint_plan.h describes the model and its results.
  // - choices: the number of choices of each block; `bytes` and the lists after it concatenate the choices of
  //   all blocks.
  // - pending: for each block, the bytes of earlier blocks that may still be on their way to the host when it
  //   begins.
  // - least_seconds: a lower bound on the time of every plan.
  //
  // simulate_checkpoint_plan predicts the same figures for a given plan.
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
