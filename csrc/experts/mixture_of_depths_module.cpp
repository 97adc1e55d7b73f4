#include <algorithm>
#include <cmath>
#include <numeric>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/init.h>

#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/experts/mixture_of_depths.h>
#include <shoestring/gemm/ops.h>

#include "checkpoint/kept_results.h"

namespace shoestring::nn {

using at::Tensor;

namespace {

constexpr const char* kDepths = "nn::MixtureOfDepths: ";

// Returns an int64 tensor on the device of `like`.
Tensor integers(const std::vector<int64_t>& values, const Tensor& like) {
  return at::tensor(values, at::kLong).to(like.device());
}

// Returns the offsets of parts of these sizes, and the end.
std::vector<int64_t> offsets_of(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> offsets(1);
  for (const int64_t size : sizes) offsets.push_back(offsets.back() + size);
  return offsets;
}

Tensor depth_logits(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias = std::nullopt) {
  const auto dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return linear(x, weight.unsqueeze(0), bias, LinearOptions().dtype(dtype)).squeeze(-1);
}

// Returns in ascending order the rows of the largest scores of each sequence, the lowest rows among equals.
Tensor heaviest_rows(const Tensor& scores, const std::vector<int64_t>& bounds,
                     const std::vector<int64_t>& counts) {
  std::vector<int64_t> taken;
  for (size_t s = 0; s < counts.size(); ++s)
    for (int64_t i = 0; i < counts[s]; ++i) taken.push_back(bounds[s] + i);
  const Tensor lengths = integers(bounds, scores).diff();
  const Tensor sequence = at::arange(lengths.numel(), lengths.options()).repeat_interleave(lengths);
  const Tensor order = std::get<1>(scores.sort(/*stable=*/true, /*dim=*/0, /*descending=*/true));
  const Tensor by_sequence =
      std::get<1>(sequence.index_select(0, order).sort(/*stable=*/true, /*dim=*/0, /*descending=*/false));
  return std::get<0>(
      order.index_select(0, by_sequence).index_select(0, integers(taken, scores)).sort(/*dim=*/0));
}

}  // namespace

// The chosen tokens of all sequences.
struct MixtureOfDepthsImpl::Chosen {
  Tensor index;
  std::vector<int64_t> counts;  // of each sequence
  at::IntArrayRef shape;        // of all tokens

  // Returns the chosen rows of an argument of all tokens, as (lead, ...). It has `trailing` dimensions
  // besides batch and tokens. `part` are the rows of the chosen tokens.
  Tensor rows_of(const char* name, const Tensor& t, int64_t trailing, const Tensor& part,
                 at::IntArrayRef lead) const {
    const int64_t tokens = shape[shape.size() - 2];
    const auto given = t.sizes().slice(0, std::max<int64_t>(0, t.dim() - trailing)),
               rest = t.sizes().slice(given.size());
    std::vector<int64_t> flat{-1}, result(lead.begin(), lead.end());
    flat.insert(flat.end(), rest.begin(), rest.end());
    result.insert(result.end(), rest.begin(), rest.end());
    const bool shared = given.equals({tokens}) || given.equals({1, tokens});
    TORCH_CHECK_VALUE(shared || given.equals(shape.slice(0, shape.size() - 1)), kDepths, name,
                      ": expected (1 or batch, tokens", trailing > 0 ? ", width" : "", ") for x of ", shape,
                      ", received ", t.sizes());
    return t.reshape(flat).index_select(0, shared ? part.remainder(tokens) : part).view(result);
  }
};

MixtureOfDepthsImpl::MixtureOfDepthsImpl(torch::nn::AnyModule given, bool block_takes_input,
                                         const MixtureOfDepthsOptions& options)
    : options(options), block(std::move(given)), block_takes_input_(block_takes_input) {
  TORCH_CHECK_VALUE(options.features() > 0, kDepths, "features: expected a number above 0, received ",
                    options.features());
  TORCH_CHECK_VALUE(options.capacity() > 0 && options.capacity() <= 1, kDepths,
                    "capacity: expected a share above 0 and at most 1, received ", options.capacity());
  TORCH_CHECK_VALUE(options.score() == "linear" || options.score() == "sigmoid", kDepths,
                    "score: expected 'linear' or 'sigmoid', received '", options.score(), "'");
  TORCH_CHECK_VALUE(
      options.choice() == "auto" || options.choice() == "top_k" || options.choice() == "predictor", kDepths,
      "choice: expected 'auto', 'top_k' or 'predictor', received '", options.choice(), "'");
  reset();
}

void MixtureOfDepthsImpl::reset() {
  if (has_block_) block = block.clone();  // this is a clone
  has_block_ = true;
  route = {};
  register_module("block", block.ptr());
  const auto parameters = block.ptr()->parameters();
  auto like = at::TensorOptions();
  if (!parameters.empty()) like = like.device(parameters[0].device());
  if (!parameters.empty() && parameters[0].is_floating_point()) like = like.dtype(parameters[0].dtype());
  router = register_parameter("router", torch::empty({options.features()}, like));
  predictor = register_parameter("predictor", torch::empty({options.features()}, like));
  predictor_bias = register_parameter("predictor_bias", torch::empty({1}, like));
  reset_parameters();
}

void MixtureOfDepthsImpl::reset_parameters() {
  const double bound = 1 / std::sqrt(static_cast<double>(options.features()));
  for (const Tensor& t : {router, predictor, predictor_bias}) torch::nn::init::uniform_(t, -bound, bound);
}

Tensor MixtureOfDepthsImpl::forward(const Tensor& x, const AttentionInput& input) {
  const std::vector<int64_t> bounds = bounds_of(x, input);
  const Tensor flat = x.reshape({-1, options.features()});
  const bool by_predictor = options.choice() == "predictor" || (options.choice() == "auto" && !is_training());
  Chosen chosen{.index = {}, .counts = {}, .shape = x.sizes()};
  Tensor offsets;
  {
    const torch::NoGradGuard no_grad;
    if (!by_predictor)
      for (size_t s = 0; s + 1 < bounds.size(); ++s) {
        const int64_t tokens = bounds[s + 1] - bounds[s];
        const auto count = static_cast<int64_t>(std::floor(options.capacity() * tokens + 0.5));
        chosen.counts.push_back(std::min(tokens, std::max<int64_t>(1, count)));
      }
    chosen.index = activations::kept_results([&]() -> std::vector<Tensor> {
      if (by_predictor) return {depth_logits(flat, predictor, predictor_bias).gt(0).nonzero().squeeze(-1)};
      return {heaviest_rows(depth_logits(flat, router), bounds, chosen.counts)};
    })[0];
    if (by_predictor) {
      offsets = at::searchsorted(chosen.index, integers(bounds, x));
      const Tensor counts = offsets.diff().cpu();
      chosen.counts.assign(counts.const_data_ptr<int64_t>(),
                           counts.const_data_ptr<int64_t>() + counts.numel());
    } else {
      offsets = integers(offsets_of(chosen.counts), x);
    }
  }
  const Tensor rows = flat.index_select(0, chosen.index);
  Tensor weight = depth_logits(rows, router);
  if (options.score() == "sigmoid") weight = weight.sigmoid();
  const Tensor out = run_block(rows, chosen, input);
  const Tensor mixed = rows + weight.unsqueeze(-1) * (out - rows);
  Tensor loss = at::zeros({}, weight.options());
  if (!by_predictor) {
    const Tensor logits = depth_logits(flat.detach(), predictor, predictor_bias);
    const Tensor target = at::zeros_like(logits).index_fill_(0, chosen.index, 1);
    loss = at::binary_cross_entropy_with_logits(logits, target, {}, {}, at::Reduction::Sum) /
           std::max<int64_t>(1, logits.numel());
  }
  if (!is_recomputing()) route = {.index = chosen.index, .offsets = offsets, .weight = weight, .loss = loss};
  return flat.index_copy(0, chosen.index, mixed.to(x.scalar_type())).view(x.sizes());
}

// Returns the offsets of all sequences in the tokens of x, and their end.
std::vector<int64_t> MixtureOfDepthsImpl::bounds_of(const Tensor& x, const AttentionInput& input) const {
  TORCH_CHECK_VALUE((x.dim() == 2 || x.dim() == 3) && x.size(-1) == options.features(), kDepths,
                    "x: expected (batch, tokens, ", options.features(), "), or (tokens, ", options.features(),
                    "), received ", x.sizes());
  TORCH_CHECK_VALUE(!input.source() && !input.bias() && !input.alibi_slopes(), kDepths,
                    "input: expected neither source, bias nor alibi_slopes, of which the part for the chosen "
                    "tokens is unknown, received one");
  const int64_t sequences = x.dim() == 3 ? x.size(0) : 1;
  if (!input.cu_seqlens_q()) return offsets_of(std::vector<int64_t>(sequences, x.size(-2)));
  TORCH_CHECK_VALUE(sequences == 1, kDepths, "cu_seqlens_q: expected none with a batch of ", sequences,
                    " sequences; pack them into one row");
  const Tensor offsets = input.cu_seqlens_q()->cpu().to(at::kLong).contiguous();
  std::vector<int64_t> bounds(offsets.const_data_ptr<int64_t>(),
                              offsets.const_data_ptr<int64_t>() + offsets.numel());
  TORCH_CHECK_VALUE(
      !bounds.empty() && bounds.front() == 0 && bounds.back() == x.size(-2) && std::ranges::is_sorted(bounds),
      kDepths, "cu_seqlens_q: expected ascending offsets from 0 to ", x.size(-2), ", received ",
      at::IntArrayRef(bounds));
  TORCH_CHECK_VALUE(!input.cu_seqlens_k() || at::equal(*input.cu_seqlens_k(), *input.cu_seqlens_q()), kDepths,
                    "cu_seqlens_k: expected none, or the offsets of cu_seqlens_q, received others");
  return bounds;
}

// Returns the results of the block for the chosen rows. Sequences with equally many of them are one batch.
Tensor MixtureOfDepthsImpl::run_block(const Tensor& rows, const Chosen& chosen, const AttentionInput& input) {
  const auto reduced = [&](const Tensor& part, at::IntArrayRef lead) {
    AttentionInput of_part = input;
    if (input.position_ids())
      of_part.position_ids(chosen.rows_of("position_ids", *input.position_ids(), 0, part, lead));
    else if (input.cos() && input.sin())  // else they are tables of all positions
      of_part.cos(chosen.rows_of("cos", *input.cos(), 1, part, lead))
          .sin(chosen.rows_of("sin", *input.sin(), 1, part, lead));
    return of_part;
  };
  const bool is_batch = chosen.shape.size() == 3;
  const int64_t all = chosen.index.numel();
  if (input.cu_seqlens_q()) {
    if (all == 0) return rows;
    std::vector<int64_t> counts = chosen.counts;
    std::erase(counts, 0);  // a document without a chosen token is none
    const auto lead = is_batch ? std::vector<int64_t>{1, all} : std::vector<int64_t>{all};
    const Tensor starts = integers(offsets_of(counts), rows).to(input.cu_seqlens_q()->scalar_type());
    AttentionInput of_part = reduced(chosen.index, lead);
    of_part.cu_seqlens_q(starts);
    if (input.cu_seqlens_k()) of_part.cu_seqlens_k(starts);
    return call_block(is_batch ? rows.unsqueeze(0) : rows, of_part);
  }
  std::vector<Tensor> parts;
  int64_t begin = 0;
  for (auto first = chosen.counts.begin(), next = first; first != chosen.counts.end(); first = next) {
    next = std::find_if(first, chosen.counts.end(), [&](int64_t count) { return count != *first; });
    const int64_t sequences = next - first, size = sequences * *first;
    if (size == 0) continue;
    const auto lead = is_batch ? std::vector<int64_t>{sequences, *first} : std::vector<int64_t>{*first};
    const Tensor part = rows.narrow(0, begin, size);
    parts.push_back(call_block(is_batch ? part.view({sequences, *first, -1}) : part,
                               reduced(chosen.index.narrow(0, begin, size), lead)));
    begin += size;
  }
  return parts.empty() ? rows : parts.size() == 1 ? parts[0] : at::cat(parts);
}

// Returns the result of the block as (rows, features).
Tensor MixtureOfDepthsImpl::call_block(const Tensor& x, const AttentionInput& input) {
  const Tensor out = block_takes_input_ ? block.forward(x, input) : block.forward(x);
  TORCH_CHECK_VALUE(out.sizes() == x.sizes(), kDepths, "block: expected a result of the shape of its input, ",
                    x.sizes(), ", received ", out.sizes());
  return out.reshape({-1, options.features()});
}

void MixtureOfDepthsImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::MixtureOfDepths(" << options.features() << ", capacity=" << options.capacity()
         << ", score=" << options.score() << ", choice=" << options.choice() << ")";
}

}  // namespace shoestring::nn
