// The schemas of this room's operators. An operator whose name ends in _ changes its arguments in place.

#include <string>

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Cross-entropy of logit_scale (hidden W^T + low up^T + bias) against target, a chunk of tokens at a time:
  // no (tokens, vocab) tensor. hidden (..., features), weight (vocab, features), or the codes of a quantised
  // one where absmax is given; target (...) int64, bias (vocab), low (..., rank), up (vocab, rank). fp32 loss
  // for 16-bit inputs. The weight's gradient is added to weight_grad (vocab, features), fp32, where that is
  // given: in backward, or at once with grad_scale, the upstream gradient that there is going to be.
  const auto quantized = [](const std::string& of) {
    return "Tensor? " + of + "absmax=None, Tensor? " + of + "nested=None, str " + of +
           "quant_type='nf4', int " + of + "block_size=64, ";
  };
  const std::string layer = quantized("") + "Tensor? low=None, Tensor? up=None, ";
  const std::string gradients =
      "Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias, Tensor grad_low, Tensor grad_up)";
  const std::string rule = layer +
                           "Tensor? class_weights=None, int ignore_index=-100, float label_smoothing=0., "
                           "float softcap=0., float logit_scale=1., float z_loss=0., float filter_eps=0., "
                           "Tensor(a!)? weight_grad=None, int workspace_mb=0";
  const std::string call = "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, " + rule +
                           ", str reduction='mean', Tensor? token_weights=None, bool shift=False, float "
                           "hard_fraction=1., float? grad_scale=None)";
  m.def(("linear_cross_entropy" + call + " -> Tensor").c_str());
  // The same, and what each token has besides: its loss, log-sum-exp and entropy (compute type), and its
  // likeliest class.
  m.def(("linear_cross_entropy_with_stats" + call +
         " -> (Tensor loss, Tensor token_loss, Tensor lse, Tensor entropy, Tensor argmax)")
            .c_str());
  // What both are made of: hidden (tokens, features), target (tokens), low (tokens, rank), and for each token
  // its results (entropy and argmax with stats, else empty). With output_mask (hidden, weight, bias, low, up)
  // the gradients of sum(grad_loss loss + grad_lse lse + grad_entropy entropy), factors of () or (tokens)
  // each; those that are not asked for are empty, and so is the weight's where it was added to weight_grad.
  // averaged: the factors are near 1 / tokens, and what 16 bits hold of the logits' gradient is multiplied by
  // about as many.
  m.def(("linear_cross_entropy_rows(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, " +
         rule +
         ", Tensor? grad_loss=None, Tensor? grad_lse=None, Tensor? grad_entropy=None, bool averaged=False, "
         "bool stats=False, bool[5] output_mask=[False, False, False, False, False]) -> (Tensor loss, Tensor "
         "lse, Tensor entropy, Tensor argmax, " +
         gradients)
            .c_str());
  // A shard of the classes, those from first_class on: for each token, in target's shape, the log-sum-exp of
  // its logits here and its target's logit, 0 where the target is elsewhere. weight, bias and up: of the
  // classes here; target: of the whole vocabulary.
  m.def(("linear_cross_entropy_shard(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, int "
         "first_class, " +
         layer +
         "int ignore_index=-100, float softcap=0., float logit_scale=1., Tensor(a!)? weight_grad=None, int "
         "workspace_mb=0) -> (Tensor lse, Tensor target_logit)")
            .c_str());
  // Cross-entropy of logits (..., vocab) against target (...) int64; fp32 loss for 16-bit logits. With _ the
  // gradient by the logits takes their place: in forward where the result is a scalar, so that its statistics
  // have no gradients, else in backward. Not without gradients, nor where autograd lets nobody change the
  // logits.
  const std::string of_logits =
      "Tensor target, *, Tensor? class_weights=None, int ignore_index=-100, float label_smoothing=0., float "
      "softcap=0., float logit_scale=1., float z_loss=0.";
  const std::string reduced =
      ", str reduction='mean', Tensor? token_weights=None, bool shift=False, float hard_fraction=1.) -> ";
  const std::string stats = "(Tensor loss, Tensor token_loss, Tensor lse, Tensor entropy, Tensor argmax)";
  m.def(("cross_entropy(Tensor logits, " + of_logits + reduced + "Tensor").c_str());
  m.def(("cross_entropy_(Tensor(a!) logits, " + of_logits + reduced + "Tensor").c_str());
  m.def(("cross_entropy_with_stats(Tensor logits, " + of_logits + reduced + stats).c_str());
  m.def(("cross_entropy_with_stats_(Tensor(a!) logits, " + of_logits + reduced + stats).c_str());
  // What they are made of: the results of each token (entropy and argmax with stats, else empty), and the
  // gradient of sum(grad_loss loss + grad_lse lse + grad_entropy entropy), factors of () or target's shape:
  // new, or in place.
  const std::string each =
      ", Tensor? grad_loss=None, Tensor? grad_lse=None, Tensor? grad_entropy=None, bool stats=False";
  m.def(("cross_entropy_rows(Tensor logits, " + of_logits + each +
         ", bool gradient=False) -> (Tensor loss, Tensor lse, Tensor entropy, Tensor argmax, Tensor "
         "grad_logits)")
            .c_str());
  m.def(("cross_entropy_rows_(Tensor(a!) logits, " + of_logits + each +
         ") -> (Tensor loss, Tensor lse, Tensor entropy, Tensor argmax)")
            .c_str());
  // How far the softmax of (hidden W^T + bias) / temperature is from the teacher's, for each token, both
  // logits a chunk of tokens at a time: 'forward_kl' KL(teacher || student), 'reverse_kl' KL(student ||
  // teacher), or 'jsd', beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 -
  // beta) student. The student's layer is as above; the teacher's has features of its own, no low and up, and
  // no gradient. target (...) int64: tokens that have ignore_index there do not count.
  const std::string distilled =
      "(Tensor hidden, Tensor weight, Tensor teacher_hidden, Tensor teacher_weight, Tensor? bias=None, "
      "Tensor? teacher_bias=None, *, " +
      layer + quantized("teacher_") +
      "Tensor? target=None, int ignore_index=-100, str divergence='forward_kl', float beta=0.5, float "
      "temperature=1., int workspace_mb=0";
  m.def(("linear_distillation" + distilled + ", str reduction='mean') -> Tensor").c_str());
  // What it is made of: tokens in one dimension, the loss of each, and with output_mask the gradients of
  // sum(grad_loss loss), a factor of () or (tokens); those that are not asked for are empty. averaged as
  // above.
  m.def(("linear_distillation_rows" + distilled +
         ", Tensor? grad_loss=None, bool averaged=False, bool[5] output_mask=[False, False, False, False, "
         "False]) -> (Tensor loss, " +
         gradients)
            .c_str());
}
