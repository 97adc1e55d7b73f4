// Declares the operators that csrc/attention implements.

#include <string>

#include <torch/library.h>

#include "attention/attention.h"

namespace shoestring::attend {
namespace {

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Computes softmax(softcap tanh(scale q k^T / softcap) + bias - alibi_slopes |i - j|) v, one block of
  // queries and keys at a time; i and j are the positions of query and key.
  // Shapes: q (batch, heads, tokens, head_dim), k and v (batch, key-value heads, keys, features); or fewer or
  // more dimensions, and sizes that broadcast (attention_shapes.h). With packed sequences: (tokens, heads,
  // features), and cu_seqlens_q and cu_seqlens_k are the int32 offsets (sequences + 1).
  // causal and window_size (left, right; -1: no limit) are aligned so that the last query is at the position
  // of the last key. bias: (batch, heads, queries, keys), where any size may be 1; with packed sequences,
  // (heads, queries of all sequences, keys of one sequence). A bool bias is true for keys that a query sees.
  // sinks (heads): score of one more key, whose value is zero.
  // If a query sees no key, its output is 0. Differentiable with respect to q, k, v, bias and sinks. lse of
  // attention_with_lse may have a gradient as well.
  // deterministic: True gives bitwise equal results in every run and does not use PyTorch's operators. None
  // follows torch.use_deterministic_algorithms.
  const std::string attended = c10::str("(", schema_of<Arguments>(), ") -> ");
  m.def(("attention" + attended + "Tensor").c_str());
  // Computes attention and also returns lse, the log-sum-exp of the scores and the sink. Its shape is (batch,
  // heads, queries) or, with packed sequences, (heads, queries). Its dtype is fp64 for fp64 inputs, else
  // fp32.
  m.def(("attention_with_lse" + attended + "(" + schema_of<Result>() + ")").c_str());
  // Computes attention_with_lse for backward, and also returns lse_rest, the part of the log-sum-exp that
  // rounding to lse has lost: lse + lse_rest has about twice the precision.
  m.def(("_attention_forward" + attended + "(" + schema_of<ResultWithRest>() + ")").c_str());
  // Returns attention's gradients with respect to q, k, v, bias and sinks, as far as output_mask selects
  // them. A gradient that is not selected is returned as an empty tensor. lse_rest is None, or the result of
  // _attention_forward. Without it the probabilities exp(score - lse) have the rounding error of lse.
  m.def(("_attention_backward(" + schema_of<BackwardArguments>() + ") -> (" + schema_of<BackwardResults>() +
         ")")
            .c_str());
  // Assigns sequences to bins of at most `capacity` tokens and returns the index of each sequence's bin,
  // counted from 0. Sequences are taken by decreasing length, and each goes into the first bin with enough
  // room. lengths: (sequences), int64, on the CPU.
  m.def("pack_sequences(Tensor lengths, int capacity) -> Tensor");
}

}  // namespace
}  // namespace shoestring::attend
