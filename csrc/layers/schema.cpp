// The schemas of this room's operators. An operator whose name ends in _ changes its arguments in place.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // x with each element dropped with probability p, the others divided by 1 - p. The mask is a function of
  // seed, one int64, and the place: backward makes it again, and nothing is kept.
  m.def("seeded_dropout(Tensor x, Tensor seed, float p) -> Tensor");
  // silu(gate) * up.
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad_output, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  // gelu(gate) * up. approximate: 'tanh' or 'none'.
  m.def("geglu(Tensor gate, Tensor up, str approximate='tanh') -> Tensor");
  m.def("geglu_backward(Tensor grad_output, Tensor gate, Tensor up, str approximate) -> (Tensor, Tensor)");
  // y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension; with a residual, of x +
  // residual, which is the second result. casting: what 16-bit input is rounded to before the last
  // multiplication, 'llama': the first factor, 'gemma': nothing, 'none': everything. weight (features), of
  // any floating-point dtype.
  m.def(R"(rms_norm(Tensor x, Tensor? weight=None, *, float eps, float offset=0.,
      str casting='llama') -> Tensor)");
  m.def(R"(add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, *, float eps, float offset=0.,
      str casting='llama') -> (Tensor y, Tensor sum))");
  // What they are made of: sum is empty without a residual, rstd fp32 (fp64 for fp64), one a row; grad_sum is
  // added to grad_x; grad_weight is empty where it is not asked for.
  m.def(R"(rms_norm_forward(Tensor x, Tensor? residual, Tensor? weight, float eps, float offset,
      str casting) -> (Tensor y, Tensor sum, Tensor rstd))");
  m.def(R"(rms_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor rstd,
      float offset, bool weight_grad) -> (Tensor grad_x, Tensor grad_weight))");
  // (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.
  m.def("layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, *, float eps) -> Tensor");
  m.def(R"(layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y,
      Tensor mean, Tensor rstd))");
  m.def(R"(layer_norm_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor? bias, Tensor mean,
      Tensor rstd, bool weight_grad, bool bias_grad) -> (Tensor grad_x, Tensor grad_weight,
      Tensor grad_bias))");
  // Rotary position embedding of q and k: (batch, heads, tokens, head_dim) or (tokens, heads, head_dim), of
  // any strides, the heads of either its own. cos and sin: (tokens, width) or (1 or batch, tokens, width), or
  // with position_ids (tokens) or (1 or batch, tokens) int64 (positions, width); width is rotary_dim / 2, or
  // rotary_dim where each angle is there twice. The first rotary_dim (None: all) elements are turned; in
  // pairs of neighbours if interleaved, else rotary_dim / 2 apart. With q_weight and k_weight (head_dim),
  // RMSNorm of each head first, times (offset + weight).
  m.def(R"(rope(Tensor q, Tensor k, Tensor cos, Tensor sin, *, int? rotary_dim=None,
      bool interleaved=False, Tensor? position_ids=None, Tensor? q_weight=None, Tensor? k_weight=None,
      float eps=1e-06, float offset=0.) -> (Tensor, Tensor))");
  // q and k: with weights, whose gradients are empty where they are not asked for.
  m.def(R"(rope_backward(Tensor grad_q, Tensor grad_k, Tensor? q, Tensor? k, Tensor cos, Tensor sin,
      int? rotary_dim, bool interleaved, Tensor? position_ids, Tensor? q_weight, Tensor? k_weight,
      float eps, float offset, bool weight_grad) -> (Tensor grad_q, Tensor grad_k, Tensor grad_q_weight,
      Tensor grad_k_weight))");
}
