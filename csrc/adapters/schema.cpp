// Schemas of the operators in csrc/adapters.

#include <string>

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Returns the index of the first PEFT pattern that matches a module's name, or -1, and the text of the
  // pattern's first group. rule: 0 matches the whole name, 1 the ending of the name, 2 a module around it, 3
  // a module with a layer number after it (csrc/adapters/pattern.h). Raises ValueError for a pattern that is
  // not supported.
  m.def("match_patterns(str caller, str[] patterns, str name, int rule) -> (int, str)");
  // Returns gain * (x W^T + scaling * low B^T) + bias with low = low_scale * dropped(x) A^T. The frozen
  // weight W is dense (out_features, in_features) in x's dtype or, if absmax is given, the codes of a
  // quantised weight. lora_A (rank, in_features), lora_B (out_features, rank), bias and gain (out_features)
  // and low_scale (tokens, rank) have any floating-point dtype. dropped is seeded_dropout. With a gate,
  // silu(gate) * x replaces x. Differentiable with respect to x, gate, bias, lora_A, lora_B and gain.
  m.def(R"(lora_linear(Tensor x, Tensor weight, Tensor? absmax, Tensor? nested, Tensor? bias,
      Tensor? lora_A, Tensor? lora_B, *, Tensor? gain=None, Tensor? low_scale=None, Tensor? gate=None,
      Tensor? seed=None, float dropout=0., float scaling=1., str quant_type='nf4',
      int block_size=64) -> Tensor)");
  // Computes lora_linear for several layers that share the input and its dropout. `layers` holds weight,
  // absmax, nested, bias, lora_A, lora_B, gain and low_scale of the first layer, then of the second, and so
  // on.
  const std::string group =
      "Tensor?[] layers, Tensor? gate, Tensor? seed, float dropout, float[] scaling, str[] quant_type, int[] "
      "block_size";
  m.def(("lora_linear_group(Tensor x, " + group + ") -> Tensor[]").c_str());
  // Forward part of lora_linear_group. Also returns `low` of all layers side by side, (tokens, sum of ranks).
  m.def(("lora_linear_group_forward(Tensor x, " + group + ") -> (Tensor[], Tensor)").c_str());
  // Returns the gradients that output_mask selects: of x, of gate, and of lora_A, lora_B and gain of each
  // layer. Gradients that are not selected are empty. outputs: y of the layers whose gain needs a gradient.
  m.def(("lora_linear_group_backward(Tensor?[] grad_outputs, Tensor?[] outputs, Tensor x, Tensor low, " +
         group + ", bool[] output_mask) -> Tensor[]")
            .c_str());
  // Returns the norms of the rows of W + scaling * B A, (out_features), without a temporary of W's size. Not
  // differentiable.
  m.def(R"(lora_weight_norm(Tensor weight, Tensor? absmax, Tensor? nested, Tensor lora_A, Tensor lora_B,
      *, float scaling=1., str quant_type='nf4', int block_size=64) -> Tensor)");
}
