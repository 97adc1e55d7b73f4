// linear_cross_entropy on CPUs with AMX. The products are so fast there that reading and writing logits in
// memory would take longer than they do. The logits are therefore never stored: they are computed twice, a
// tile of classes and tokens at a time. The first time gives the largest logit and the sum of exponentials
// of each token. The second time gives the gradient of the logits, which is rounded to bf16 in the formats
// that the products for the gradients of weight and hidden read.
//
// A segment is a range of classes whose weights stay in the L2 cache of a core while all tokens pass by.
// Threads divide the segments among them. Sizes do not depend on the number of threads, and sums over
// segments have a fixed order, so neither does the result.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "core/huge_pages.h"
#include "gemm/gemm.h"
#include "gemm/gemm_table.h"
#include "gemm/products.h"
#include "losses/linear_cross_entropy.h"
#include "losses/linear_cross_entropy_tiles_table.h"

namespace shoestring::losses {
namespace {

using at::Tensor;
using gemm::parts_of;
using kernels::kTileTokens;

constexpr int64_t kLines = 32;  // lines of a packed panel
static_assert(kLines == kTileTokens && kLines == kernels::kTileClasses);
// Maximum number of tokens in a panel of the product for the gradient of the weight. A panel of 32 features
// then takes 32 KiB and stays in the L1 cache.
constexpr int64_t kTokenDepth = 512;
// Limits in bytes for the packed weights of a segment. The product for the gradient of the weight needs the
// L2 cache for its sums as well.
constexpr int64_t kSegmentBytes = int64_t{512} << 10, kGradientSegmentBytes = int64_t{256} << 10;
// limit in bytes for the sums of the gradient of hidden that stay in the L2 cache
constexpr int64_t kSumBytes = int64_t{1} << 20;
// limit in bytes for the gradient of the logits of a round, after which the threads synchronise
constexpr int64_t kRoundBytes = int64_t{8} << 20;
// With more features, computing the logits twice takes longer than storing them.
constexpr int64_t kMostFeatures = 1024;
// With fewer tokens, packing the weight takes longer than multiplying.
constexpr int64_t kLeastTokens = 64;

class LinearCrossEntropyByTiles {
 public:
  LinearCrossEntropyByTiles(const LinearCrossEntropyProblem& problem, const std::vector<int64_t>& rows);

  LinearCrossEntropyResult operator()() {
    for (int64_t begin = 0; begin < count(); begin += chunk_) add_chunk(begin);
    const auto narrow = [&](int i, at::ScalarType type) {
      if (!p_.mask[i] || gradient(i).scalar_type() == type) return;
      gradient(i) =
          in_huge_pages(at::empty(gradient(i).sizes(), gradient(i).options().dtype(type))).copy_(gradient(i));
    };
    if (!p_.options.weight_grad()) narrow(kWeight, p_.weight.scalar_type());
    if (p_.bias) narrow(kBias, p_.bias->scalar_type());
    return out_;
  }

 private:
  struct Classes {
    int64_t first, count;
  };
  // The tokens of a chunk, from token number `begin` of those that are not ignored.
  struct Chunk {
    int64_t begin, tokens, panels;
    Tensor index;
    // The hidden states, packed for the products with the tokens as columns of the result, and with the
    // tokens as the depth.
    Tensor columns, depth;
    Tensor target;                      // int32
    Tensor largest, factor, at_target;  // see TileUpstream
    Tensor sums;                        // transposed gradient of hidden, (panels, features, kTileTokens)
  };

  void add_chunk(int64_t begin);
  void pack_hidden(Chunk& chunk) const;
  // Computes the losses, and what the gradients need to know of each token.
  void reduce(Chunk& chunk);
  void add_gradients(Chunk& chunk);
  void add_segment(const Chunk& chunk, Classes segment, float* right, float* weight, float* scratch);
  void add_hidden(const Chunk& chunk, int64_t first, int64_t last, const float* right, const float* weight);
  void write_hidden(const Chunk& chunk);

  int64_t count() const { return static_cast<int64_t>(rows_.size()); }
  Tensor& gradient(int i) { return out_.gradients[i]; }
  // Returns the number of classes in a segment whose packed weights take `bytes` bytes.
  int64_t segment_size(int64_t bytes) const {
    return std::clamp<int64_t>(bytes / (2 * features_) / kLines * kLines, kLines, bytes >> 10);
  }
  Classes classes_of(int64_t segment, int64_t size) const {
    return {segment * size, std::min(size, vocab_ - segment * size)};
  }
  // Returns the size in fp32 elements of a panel of this depth.
  int64_t packed(int64_t depth) const {
    const int64_t multiple = product_.depth_multiple;
    return kernels::packed_size(parts_of(depth, multiple) * multiple, product_.steps, kLines);
  }
  // Packs rows of the weight, with the classes or the features as lines.
  void pack_weight(Classes segment, bool classes_are_lines, float* out) const;
  void multiply(const float* a, const float* b, int64_t m, int64_t n, int64_t depth, float* c, int64_t stride,
                bool add, const kernels::GemmNarrow* narrow = nullptr) const {
    product_.multiply(a, b, m, n, depth, c, stride, 1, add ? 1 : 0, narrow, /*b_outside=*/true,
                      /*ahead=*/{});
  }
  static int64_t whole(int64_t lines) { return parts_of(lines, kLines) * kLines; }
  Tensor floats(at::IntArrayRef shape) const {
    return in_huge_pages(at::empty(shape, p_.input.options().dtype(at::kFloat)));
  }
  // Returns the logits of a segment, whose weights are packed, for the tokens of panel number `panel`.
  kernels::LogitBlock block_of(const Chunk& chunk, int64_t panel, Classes segment, const float* weight) const;

  const LinearCrossEntropyProblem& p_;
  const std::vector<int64_t>& rows_;
  const kernels::GemmProduct& product_ = cpu::gemm_amx();
  const kernels::LinearCrossEntropyTiles& kernels_ = cpu::linear_cross_entropy_tiles();
  const Tensor target_;
  const kernels::CrossEntropyFormula formula_;
  const Tensor bias_;
  const Factor<float> grad_loss_, grad_lse_;
  const int64_t features_, vocab_;
  const bool gradient_;
  int64_t segment_, segments_, chunk_;
  Tensor grad_weight_;   // the fp32 tensor to which the gradient of the weight is added
  bool fresh_ = false;   // whether grad_weight_ is still uninitialised
  bool rounds_ = false;  // whether the gradient of the weight is rounded to bf16 without grad_weight_
  LinearCrossEntropyResult out_;
};

LinearCrossEntropyByTiles::LinearCrossEntropyByTiles(const LinearCrossEntropyProblem& problem,
                                                     const std::vector<int64_t>& rows)
    : p_(problem), rows_(rows), target_(p_.target.contiguous()), formula_(p_.formula()),
      bias_(p_.bias ? p_.bias->to(at::kFloat).mul(formula_.logit_scale) : Tensor()), grad_loss_(p_.grad_loss),
      grad_lse_(p_.grad_lse), features_(p_.input.size(1)), vocab_(p_.classes.expect_int()),
      gradient_(any(p_.mask)) {
  segment_ = segment_size(kGradientSegmentBytes);
  segments_ = parts_of(vocab_, segment_);
  // The packed hidden states and the sums of their gradient take 8 bytes for each feature.
  const int64_t given = (p_.options.workspace_mb() == 0 ? kDefaultWorkspaceMb : p_.options.workspace_mb())
                        << 20;
  const int64_t most = std::max<int64_t>(1, given / 2 / (8 * features_) / kTokenDepth) * kTokenDepth;
  chunk_ = parts_of(parts_of(count(), parts_of(count(), most)), kTileTokens) * kTileTokens;

  static_cast<RowsResult&>(out_) = p_.allocate(/*zeros=*/true);
  if (p_.mask[kHidden]) {
    gradient(kHidden) = count() == p_.input.size(0) ? at::empty_like(p_.input, at::MemoryFormat::Contiguous)
                                                    : at::zeros_like(p_.input, at::MemoryFormat::Contiguous);
  }
  // A single chunk gives the whole gradient of the weight, which is then rounded once, a segment at a time.
  rounds_ = p_.mask[kWeight] && !p_.options.weight_grad() && count() <= chunk_ &&
            p_.weight.scalar_type() == at::kBFloat16;
  if (rounds_) {
    gradient(kWeight) = in_huge_pages(at::empty({vocab_, features_}, p_.weight.options()));
  } else if (p_.mask[kWeight]) {
    grad_weight_ = p_.options.weight_grad() ? *p_.options.weight_grad() : floats({vocab_, features_});
    if (!p_.options.weight_grad()) gradient(kWeight) = grad_weight_;
    fresh_ = !p_.options.weight_grad();
  }
  if (p_.mask[kBias]) gradient(kBias) = at::zeros({vocab_}, p_.input.options().dtype(at::kDouble));
}

void LinearCrossEntropyByTiles::add_chunk(int64_t begin) {
  Chunk chunk{};
  chunk.begin = begin;
  chunk.tokens = std::min(chunk_, count() - begin);
  chunk.panels = parts_of(chunk.tokens, kTileTokens);
  pack_hidden(chunk);
  reduce(chunk);
  if (gradient_) add_gradients(chunk);
}

void LinearCrossEntropyByTiles::pack_hidden(Chunk& chunk) const {
  const int64_t padded = chunk.panels * kTileTokens;
  chunk.index = at::from_blob(const_cast<int64_t*>(rows_.data() + chunk.begin), {chunk.tokens}, at::kLong);
  const Tensor x = count() == p_.input.size(0) ? p_.input.narrow(0, chunk.begin, chunk.tokens).contiguous()
                                               : p_.input.index_select(0, chunk.index);
  const auto* from = reinterpret_cast<const uint16_t*>(x.const_data_ptr());
  chunk.columns = floats({chunk.panels, packed(features_)});
  float* columns = chunk.columns.mutable_data_ptr<float>();
  at::parallel_for(0, chunk.panels, 1, [&](int64_t first, int64_t last) {
    product_.pack_bf16(from + first * kLines * features_,
                       std::min(last * kLines, chunk.tokens) - first * kLines, features_, features_, 1,
                       kLines, columns + first * packed(features_));
  });
  if (p_.mask[kWeight]) {
    // pieces of kTokenDepth tokens, each with a panel for every kLines features
    const int64_t panels = parts_of(features_, kLines), piece = panels * packed(kTokenDepth);
    const int64_t pieces = parts_of(chunk.tokens, kTokenDepth);
    chunk.depth = floats({pieces, piece});
    float* depth = chunk.depth.mutable_data_ptr<float>();
    at::parallel_for(0, pieces * panels, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t token = i / panels * kTokenDepth, line = i % panels * kLines;
        const int64_t tokens = std::min(kTokenDepth, chunk.tokens - token);
        product_.pack_bf16(from + token * features_ + line, std::min(kLines, features_ - line), tokens, 1,
                           features_, kLines, depth + i / panels * piece + i % panels * packed(tokens));
      }
    });
  }
  chunk.target = at::full({padded}, -1, at::kInt);
  auto* target = chunk.target.mutable_data_ptr<int32_t>();
  const auto* classes = target_.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < chunk.tokens; ++i)
    target[i] = static_cast<int32_t>(classes[rows_[chunk.begin + i]]);
}

void LinearCrossEntropyByTiles::pack_weight(Classes segment, bool classes_are_lines, float* out) const {
  const int64_t stride = p_.weight.stride(0), n = segment.count;
  const auto run = [&](auto pack, const auto* data) {
    const auto* from = data + segment.first * stride;
    if (classes_are_lines) {
      pack(from, n, features_, stride, 1, kLines, out);
    } else {
      pack(from, features_, n, 1, stride, kLines, out);
    }
  };
  if (p_.weight.scalar_type() == at::kFloat) {
    run(product_.rows.from_float, p_.weight.const_data_ptr<float>());
  } else {
    run(product_.rows.from_bf16, reinterpret_cast<const uint16_t*>(p_.weight.const_data_ptr()));
  }
}

kernels::LogitBlock LinearCrossEntropyByTiles::block_of(const Chunk& chunk, int64_t panel, Classes segment,
                                                        const float* weight) const {
  const int64_t size = packed(features_);
  return {weight,
          size,
          chunk.columns.const_data_ptr<float>() + panel * size,
          whole(features_),
          segment.count,
          static_cast<float>(formula_.logit_scale),
          bias_.defined() ? bias_.const_data_ptr<float>() + segment.first : nullptr,
          chunk.target.const_data_ptr<int32_t>() + panel * kTileTokens,
          static_cast<int32_t>(segment.first)};
}

void LinearCrossEntropyByTiles::reduce(Chunk& chunk) {
  const int64_t padded = chunk.panels * kTileTokens;
  const int64_t segment = segment_size(kSegmentBytes), segments = parts_of(vocab_, segment);
  const Tensor largest = at::full({segments, padded}, -FLT_MAX, p_.input.options().dtype(at::kFloat));
  const Tensor sum = at::zeros_like(largest), at_target = at::zeros({padded}, largest.options());
  float *largests = largest.mutable_data_ptr<float>(), *sums = sum.mutable_data_ptr<float>();
  float* at_targets = at_target.mutable_data_ptr<float>();
  const int64_t size = segment / kLines * packed(features_);
  const Tensor scratch = floats({at::get_num_threads(), size});
  float* scratches = scratch.mutable_data_ptr<float>();
  at::parallel_for(0, segments, 1, [&](int64_t first, int64_t last) {
    float* weight = scratches + at::get_thread_num() * size;
    for (int64_t s = first; s < last; ++s) {
      const Classes classes = classes_of(s, segment);
      pack_weight(classes, true, weight);
      for (int64_t j = 0; j < chunk.panels; ++j) {
        const int64_t t = j * kTileTokens, at = s * padded + t;
        kernels_.statistics(block_of(chunk, j, classes, weight), {largests + at, sums + at, at_targets + t});
      }
    }
  });
  at::parallel_for(0, chunk.panels, 8, [&](int64_t first, int64_t last) {
    for (int64_t j = first; j < last; ++j)
      kernels_.combine(segments, padded, largests + j * kTileTokens, sums + j * kTileTokens);
  });

  chunk.largest = largest.select(0, 0).clone();
  chunk.factor = at::zeros_like(at_target);
  chunk.at_target = at::zeros_like(at_target);
  float *factor = chunk.factor.mutable_data_ptr<float>(), *less = chunk.at_target.mutable_data_ptr<float>();
  float *losses = out_.loss.mutable_data_ptr<float>(), *lses = out_.lse.mutable_data_ptr<float>();
  for (int64_t i = 0; i < chunk.tokens; ++i) {
    const int64_t token = rows_[chunk.begin + i];
    const double sum = sums[i], log_sum = std::log(sum), x = largests[i] + log_sum, u = grad_loss_[token];
    lses[token] = static_cast<float>(x);
    losses[token] = static_cast<float>(log_sum + (largests[i] - at_targets[i]) + formula_.z_loss * x * x);
    factor[i] = static_cast<float>((u * (1 + 2 * formula_.z_loss * x) + grad_lse_[token]) *
                                   formula_.logit_scale / sum);
    less[i] = static_cast<float>(u * formula_.logit_scale);
  }
}

void LinearCrossEntropyByTiles::add_gradients(Chunk& chunk) {
  const int64_t right_size = chunk.panels * packed(segment_);
  const int64_t weight_size = parts_of(features_, kLines) * packed(segment_);
  const int64_t fit = kRoundBytes / static_cast<int64_t>(sizeof(float)) / right_size;
  const int64_t round =
      std::min(segments_, parts_of(std::max<int64_t>(fit, 1), at::get_num_threads()) * at::get_num_threads());
  Tensor right, weight;
  if (p_.mask[kHidden]) {
    right = floats({round, right_size});
    weight = floats({round, weight_size});
    chunk.sums = floats({chunk.panels, whole(features_) * kTileTokens});
  }
  float *rights = right.defined() ? right.mutable_data_ptr<float>() : nullptr,
        *weights = weight.defined() ? weight.mutable_data_ptr<float>() : nullptr;
  // packed weights, the gradient of the logits of kTokenDepth tokens, the sums for the bias, and the gradient
  // of the weights before it is rounded
  const int64_t size = segment_ / kLines * (packed(features_) + packed(kTokenDepth)) + segment_ * 16 +
                       (rounds_ ? segment_ * features_ : 0);
  const Tensor scratch = floats({at::get_num_threads(), size});
  float* scratches = scratch.mutable_data_ptr<float>();
  for (int64_t begin = 0; begin < segments_; begin += round) {
    const int64_t end = std::min(begin + round, segments_);
    at::parallel_for(begin, end, 1, [&](int64_t first, int64_t last) {
      for (int64_t s = first; s < last; ++s) {
        add_segment(chunk, classes_of(s, segment_),
                    rights == nullptr ? nullptr : rights + (s - begin) * right_size,
                    weights == nullptr ? nullptr : weights + (s - begin) * weight_size,
                    scratches + at::get_thread_num() * size);
      }
    });
    if (p_.mask[kHidden]) add_hidden(chunk, begin, end, rights, weights);
  }
  fresh_ = false;
  if (p_.mask[kHidden]) write_hidden(chunk);
}

void LinearCrossEntropyByTiles::add_segment(const Chunk& chunk, Classes segment, float* right,
                                            float* weight_out, float* scratch) {
  const int64_t tile = packed(features_), n = segment.count, panels = parts_of(features_, kLines);
  float *weight = scratch, *left = weight + segment_ / kLines * tile,
        *sums = left + segment_ / kLines * packed(kTokenDepth), *wide = sums + segment_ * 16;
  const float* columns = chunk.columns.const_data_ptr<float>();
  const float *largest = chunk.largest.const_data_ptr<float>(),
              *factor = chunk.factor.const_data_ptr<float>(), *less = chunk.at_target.const_data_ptr<float>();
  pack_weight(segment, true, weight);
  if (weight_out != nullptr) pack_weight(segment, false, weight_out);
  if (p_.mask[kBias]) std::fill_n(sums, segment_ * 16, 0.f);
  for (int64_t begin = 0; begin < chunk.tokens; begin += kTokenDepth) {
    const int64_t depth = std::min(kTokenDepth, chunk.tokens - begin);
    for (int64_t t = begin; t < begin + depth; t += kTileTokens) {
      const int64_t j = t / kTileTokens, next = std::min(j + 1, chunk.panels - 1);
      const kernels::TileOperands out{p_.mask[kWeight] ? left + (t - begin) * kLines / 2 : nullptr,
                                      packed(depth), right == nullptr ? nullptr : right + j * packed(n),
                                      p_.mask[kBias] ? sums : nullptr};
      kernels_.gradient(block_of(chunk, j, segment, weight), {largest + t, factor + t, less + t}, out,
                        columns + next * tile, tile * static_cast<int64_t>(sizeof(float)));
    }
    if (p_.mask[kWeight]) {
      const int64_t offset = segment.first * features_;
      const bool last = rounds_ && begin + depth == chunk.tokens;
      kernels::GemmNarrow rounded{};
      if (last) {
        rounded.data = static_cast<uint16_t*>(gradient(kWeight).mutable_data_ptr()) + offset;
        rounded.stride = features_;
      }
      multiply(left, chunk.depth.const_data_ptr<float>() + begin / kTokenDepth * panels * packed(kTokenDepth),
               n, features_, depth, rounds_ ? wide : grad_weight_.mutable_data_ptr<float>() + offset,
               features_, begin > 0 || (!rounds_ && !fresh_), last ? &rounded : nullptr);
    }
  }
  if (p_.mask[kBias]) {
    double* to = gradient(kBias).mutable_data_ptr<double>() + segment.first;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t k = 0; k < 16; ++k) to[i] += sums[i * 16 + k];
    }
  }
}

void LinearCrossEntropyByTiles::add_hidden(const Chunk& chunk, int64_t first, int64_t last,
                                           const float* right, const float* weight) {
  const int64_t right_size = chunk.panels * packed(segment_),
                weight_size = parts_of(features_, kLines) * packed(segment_);
  const int64_t sum_size = whole(features_) * kTileTokens;
  const int64_t group = std::max<int64_t>(1, kSumBytes / static_cast<int64_t>(sizeof(float)) / sum_size);
  float* sums = chunk.sums.mutable_data_ptr<float>();
  at::parallel_for(0, chunk.panels, 1, [&](int64_t from, int64_t to) {
    for (int64_t begin = from; begin < to; begin += group) {
      for (int64_t s = first; s < last; ++s) {
        const int64_t depth = classes_of(s, segment_).count;
        for (int64_t j = begin; j < std::min(begin + group, to); ++j) {
          multiply(weight + (s - first) * weight_size, right + (s - first) * right_size + j * packed(depth),
                   whole(features_), kTileTokens, depth, sums + j * sum_size, kTileTokens, s > 0);
        }
      }
    }
  });
}

void LinearCrossEntropyByTiles::write_hidden(const Chunk& chunk) {
  auto* out = reinterpret_cast<uint16_t*>(gradient(kHidden).mutable_data_ptr());
  const float* sums = chunk.sums.const_data_ptr<float>();
  at::parallel_for(0, chunk.panels, 4, [&](int64_t first, int64_t last) {
    for (int64_t j = first; j < last; ++j) {
      uint16_t* rows[kTileTokens];
      const int64_t tokens = std::min(kTileTokens, chunk.tokens - j * kTileTokens);
      for (int64_t i = 0; i < tokens; ++i)
        rows[i] = out + rows_[chunk.begin + j * kTileTokens + i] * features_;
      kernels_.transpose(sums + j * whole(features_) * kTileTokens, tokens, features_, rows);
    }
  });
}

}  // namespace

bool fits_tiles(const LinearCrossEntropyProblem& p, int64_t tokens) {
  const auto weight = p.weight.scalar_type();
  const LinearCrossEntropyOptions& o = p.options;
  // The kernels have no other option of the formula than these two.
  const kernels::CrossEntropyFormula formula = p.formula();
  kernels::CrossEntropyFormula supported;
  supported.logit_scale = formula.logit_scale;
  supported.z_loss = formula.z_loss;
  return gemm::multiplies_by_tiles() && tokens >= kLeastTokens && p.input.scalar_type() == at::kBFloat16 &&
         !o.absmax() && (weight == at::kBFloat16 || weight == at::kFloat) && p.weight.stride(1) == 1 &&
         !o.lora_hidden() && !o.class_weights() && !o.target2() &&
         std::memcmp(&formula, &supported, sizeof supported) == 0 && !p.stats && !p.grad_entropy &&
         o.filter_eps() == 0 && (!o.weight_grad() || o.weight_grad()->is_contiguous()) &&
         p.input.size(1) >= kLines && p.input.size(1) <= kMostFeatures && p.weight.size(0) >= kLines;
}

LinearCrossEntropyResult linear_cross_entropy_by_tiles(const LinearCrossEntropyProblem& p,
                                                       const std::vector<int64_t>& rows) {
  return LinearCrossEntropyByTiles(p, rows)();
}

}  // namespace shoestring::losses
