// The schemas of this room's operators. An operator whose name ends in _ changes its arguments in place.

#include <string>

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // The first of PEFT's patterns that matches a module's name, or -1, and the text of its first group. rule:
  // 0 the whole name, 1 what it ends with, 2 a module that it is in, 3 the number of its layer
  // (csrc/adapters/pattern.h). Raises ValueError.
  m.def("match_patterns(str caller, str[] patterns, str name, int rule) -> (int, str)");
  // gain * (x W^T + scaling * low B^T) + bias with low = low_scale * dropped(x) A^T. W is frozen: dense
  // (out_features, in_features) in x's dtype, or, where absmax is given, the codes of a quantised weight.
  // lora_A (rank, in_features), lora_B (out_features, rank), bias and gain (out_features), low_scale (tokens,
  // rank), of any floating-point dtype. dropped: seeded_dropout; with a gate, x is silu(gate) * x. Gradients
  // by x, gate, bias, lora_A, lora_B and gain.
  m.def(R"(lora_linear(Tensor x, Tensor weight, Tensor? absmax, Tensor? nested, Tensor? bias,
      Tensor? lora_A, Tensor? lora_B, *, Tensor? gain=None, Tensor? low_scale=None, Tensor? gate=None,
      Tensor? seed=None, float dropout=0., float scaling=1., str quant_type='nf4',
      int block_size=64) -> Tensor)");
  // Several layers over one input, which share the dropout. layers has weight, absmax, nested, bias, lora_A,
  // lora_B, gain and low_scale of the first one, then of the second, and so on.
  const std::string group =
      "Tensor?[] layers, Tensor? gate, Tensor? seed, float dropout, float[] scaling, str[] quant_type, int[] "
      "block_size";
  m.def(("lora_linear_group(Tensor x, " + group + ") -> Tensor[]").c_str());
  // The same, with low of all layers side by side (tokens, ranks).
  m.def(("lora_linear_group_forward(Tensor x, " + group + ") -> (Tensor[], Tensor)").c_str());
  // The gradients that output_mask asks for: by x, gate, and lora_A, lora_B and gain of each layer; the
  // others are empty. outputs: of the layers whose gain has a gradient.
  m.def(("lora_linear_group_backward(Tensor?[] grad_outputs, Tensor?[] outputs, Tensor x, Tensor low, " +
         group + ", bool[] output_mask) -> Tensor[]")
            .c_str());
  // The norms of the rows of W + scaling * B A (out_features), without a temporary of W's size. No gradients.
  m.def(R"(lora_weight_norm(Tensor weight, Tensor? absmax, Tensor? nested, Tensor lora_A, Tensor lora_B,
      *, float scaling=1., str quant_type='nf4', int block_size=64) -> Tensor)");
}
