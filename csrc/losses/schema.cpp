// Schemas of the operators in csrc/losses. An operator whose name ends in _ may modify its arguments in
// place. Arguments and results are those of the structs, which list them (core/arguments.h).

#include <string>

#include <torch/library.h>

#include "losses/cross_entropy.h"
#include "losses/linear_cross_entropy.h"
#include "losses/linear_distillation.h"

namespace shoestring::losses {
namespace {

template <class Arguments, class Results>
void define(torch::Library& m, const std::string& name) {
  m.def((name + "(" + schema_of<Arguments>() + ") -> (" + schema_of<Results>() + ")").c_str());
}

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // linear_cross_entropy computes the cross-entropy of the logits logit_scale * (hidden W^T + lora_hidden
  // lora_B^T + bias) against target. It processes a chunk of tokens at a time, and never has a (tokens,
  // vocab) tensor.
  //
  // Shapes: hidden (..., features), target (...) int64, bias (vocab), lora_hidden (..., rank), lora_B (vocab,
  // rank). weight is W (vocab, features) or, if absmax is given, the codes of a quantised W. The loss is fp32
  // for 16-bit inputs. On the CPU, W may be fp32 if hidden is 16-bit. It is then rounded to hidden's dtype,
  // and its gradient is fp32.
  //
  // If weight_grad, fp32 (vocab, features), is given, the gradient of the weight is added to it. This happens
  // in backward; or in forward, if upstream_grad gives the upstream gradient that backward is going to get.
  const std::string stats = " -> (" + schema_of<StatsResult>() + ")";
  const std::string linear = "(" + schema_of<LinearCrossEntropyProblem>() + ")";
  m.def(("linear_cross_entropy" + linear + " -> Tensor").c_str());
  // Like linear_cross_entropy, but also returns each token's loss, log-sum-exp, entropy and most likely
  // class, and the number of tokens whose most likely class is their target. Loss, log-sum-exp and entropy
  // are fp32 for 16-bit inputs.
  m.def(("linear_cross_entropy_with_stats" + linear + stats).c_str());
  // Computes loss, log-sum-exp, entropy and argmax of each token, for linear_cross_entropy and
  // linear_cross_entropy_with_stats. Shapes: hidden (tokens, features), target (tokens), lora_hidden (tokens,
  // rank). entropy and argmax are empty unless stats is set.
  //
  // output_mask (hidden, weight, bias, lora_hidden, lora_B) requests gradients of sum(grad_loss * loss +
  // grad_lse * lse + grad_entropy * entropy). The upstream gradients grad_loss, grad_lse and grad_entropy
  // have the shape () or (tokens). A gradient that is not requested is returned empty. So is the gradient of
  // the weight if it was added to weight_grad.
  //
  // averaged tells that the upstream gradients are about 1 / tokens. The 16-bit gradient of the logits is
  // then stored multiplied by about the number of tokens.
  define<LinearCrossEntropyRowsArguments, LinearCrossEntropyResult>(m, "_linear_cross_entropy_rows");
  // Computes the part of a cross-entropy that belongs to one shard of the classes, whose first class is
  // first_class. Returns for each token, in target's shape, the log-sum-exp of its logits in this shard and
  // the logit of its target. This logit is 0 if the target is in another shard. weight, bias and lora_B
  // belong to this shard's classes; target holds class indices of the whole vocabulary.
  define<LinearCrossEntropyShardCall<LinearCrossEntropyShardOptions>, ShardResult>(
      m, "linear_cross_entropy_shard");
  // The same, with target_loss in place of the logit of the target: the log-sum-exp of this shard minus that
  // logit. The difference is precise, also if it is small compared with both.
  define<LinearCrossEntropyShardCall<LinearCrossEntropyShardOptions>, ShardLoss>(
      m, "_linear_cross_entropy_shard");
  // cross_entropy computes the cross-entropy of logits (..., vocab) against target (...) int64. dim is the
  // dimension of the classes. Logits whose classes are not contiguous in memory are copied. The loss is
  // fp32 for 16-bit logits. The variants with _ replace the logits by their gradient. If the result is a
  // scalar, forward does so, and the statistics have no gradients. Otherwise backward does so. The logits
  // stay unchanged if they need no gradient, or if autograd does not allow changing them.
  const std::string logits = "(" + schema_of<CrossEntropyProblem>() + ")";
  std::string changed = logits;
  changed.replace(changed.find("Tensor logits"), 6, "Tensor(a!)");
  m.def(("cross_entropy" + logits + " -> Tensor").c_str());
  m.def(("cross_entropy_" + changed + " -> Tensor").c_str());
  m.def(("cross_entropy_with_stats" + logits + stats).c_str());
  m.def(("cross_entropy_with_stats_" + changed + stats).c_str());
  // Computes loss, log-sum-exp, entropy and argmax of each row of logits, for the four cross_entropy
  // operators. entropy and argmax are empty unless stats is set. Also computes the gradient of sum(grad_loss
  // * loss + grad_lse * lse + grad_entropy * entropy). The upstream gradients grad_loss, grad_lse and
  // grad_entropy have the shape () or target's shape. _cross_entropy_rows returns the gradient as a new
  // tensor, if `gradient` is set. _cross_entropy_rows_ writes it into the logits.
  define<CrossEntropyRowsArguments<false>, CrossEntropyResult>(m, "_cross_entropy_rows");
  define<CrossEntropyRowsArguments<true>, RowsResult>(m, "_cross_entropy_rows_");
  // Computes for each token the divergence between two softmax distributions, a teacher's and a student's.
  // The student's is the softmax of (hidden W^T + bias) / temperature. Logits exist for one chunk of tokens
  // at a time.
  // - 'forward_kl': KL(teacher || student);
  // - 'reverse_kl': KL(student || teacher);
  // - 'jsd': beta KL(teacher || m) + (1 - beta) KL(student || m), with m = beta teacher + (1 - beta) student.
  // The student's layer has the same arguments as in linear_cross_entropy. The teacher's layer has its own
  // number of features, no LoRA pair (lora_hidden, lora_B), and no gradient. Tokens whose target (...) int64
  // is ignore_index are ignored.
  m.def(("linear_distillation(" + schema_of<DistillationProblem>() + ") -> Tensor").c_str());
  // Computes the loss of each token for linear_distillation; hidden has the shape (tokens, features).
  // output_mask requests gradients of sum(grad_loss * loss), where grad_loss has the shape () or (tokens). A
  // gradient that is not requested is returned empty. averaged tells that grad_loss is about 1 / tokens, as
  // in _linear_cross_entropy_rows.
  define<DistillationRowsArguments, DistillationResult>(m, "_linear_distillation_rows");
  // Returns the Min-SNR weights of timesteps (...), fp32 (...); see shoestring/losses/diffusion.h.
  m.def(
      R"(_min_snr_weights(Tensor alphas_cumprod, Tensor timesteps, float gamma, str prediction) -> Tensor)");
}

}  // namespace
}  // namespace shoestring::losses
