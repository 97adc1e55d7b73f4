// linear_cross_entropy on CPUs with AMX. The products are so fast there that reading and writing logits in
// memory would take longer than they do. The logits are therefore never stored: they are computed twice, a
// tile of classes and tokens at a time. The first time gives the largest logit and the sum of exponentials
// of each token. The second time gives the gradient of the logits, which is rounded to bf16 in the formats
// that the products for the gradients of weight and hidden read.
//
// A segment is a range of classes whose weights stay in the L2 cache of a core while all tokens pass by.
// Threads divide the segments among them. Sizes do not depend on the number of threads, and sums over
// segments have a fixed order, so neither does the result.

#include "losses/linear_cross_entropy_tiles.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "core/huge_pages.h"
#include "gemm/gemm.h"
#include "gemm/gemm_table.h"
#include "gemm/products.h"
#include "losses/cross_entropy_cpu.h"
#include "losses/linear_cross_entropy_tiles_table.h"

namespace shoestring::losses {
namespace {

using at::Tensor;
using gemm::parts_of;
using kernels::kTileTokens;

constexpr int64_t kLines = 32;         // lines of a packed panel
constexpr int64_t kTileClasses = 128;  // classes of a tile of logits, which stays in the L1 cache
// Maximum number of tokens in a panel of the product for the gradient of the weight. A panel of 32 features
// then takes 32 KiB and stays in the L1 cache.
constexpr int64_t kTokenDepth = 512;
// limit in bytes for the packed weights of a segment
constexpr int64_t kSegmentBytes = int64_t{512} << 10;
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
    if (!p_.weight_grad) narrow(kWeight, p_.weight.scalar_type());
    if (p_.bias) narrow(kBias, p_.bias->scalar_type());
    return out_;
  }

 private:
  // The tokens of a chunk, from token number `begin` of those that are not ignored.
  struct Chunk {
    int64_t begin, tokens, panels;
    Tensor index;
    // The hidden states, packed for the products with the tokens as columns of the result, and with the
    // tokens as the depth.
    Tensor columns, depth;
    Tensor target;                  // int32
    Tensor lse, factor, at_target;  // see TileUpstream
    Tensor sums;                    // transposed gradient of hidden, (panels, features, kTileTokens)
  };

  void add_chunk(int64_t begin);
  void pack_hidden(Chunk& chunk) const;
  // Computes the losses, and what the gradients need to know of each token.
  void reduce(Chunk& chunk);
  void add_gradients(Chunk& chunk);
  void add_segment(const Chunk& chunk, int64_t segment, float* right, float* weight, float* scratch);
  void add_hidden(const Chunk& chunk, int64_t first, int64_t last, const float* right, const float* weight);
  void write_hidden(const Chunk& chunk);

  int64_t count() const { return static_cast<int64_t>(rows_.size()); }
  Tensor& gradient(int i) { return out_.gradients[i]; }
  int64_t first_class(int64_t segment) const { return segment * segment_; }
  int64_t classes(int64_t segment) const { return std::min(segment_, vocab_ - first_class(segment)); }
  // Returns the size in fp32 elements of a panel of this depth.
  int64_t packed(int64_t depth) const {
    const int64_t multiple = product_.depth_multiple;
    return kernels::packed_size(parts_of(depth, multiple) * multiple, product_.steps, kLines);
  }
  // Packs rows of the weight, with the classes or the features as lines.
  void pack_weight(int64_t segment, bool classes_are_lines, float* out) const;
  void multiply(const float* a, const float* b, int64_t m, int64_t n, int64_t depth, float* c, int64_t stride,
                bool add) const {
    product_.multiply(a, b, m, n, depth, c, stride, 1, add ? 1 : 0, nullptr, /*b_outside=*/true);
  }
  static int64_t whole(int64_t lines) { return parts_of(lines, kLines) * kLines; }
  Tensor floats(at::IntArrayRef shape) const {
    return in_huge_pages(at::empty(shape, p_.hidden.options().dtype(at::kFloat)));
  }
  kernels::LogitTile tile_of(const float* z, int64_t first, int64_t classes, int32_t* target,
                             const int32_t* all) const;

  const LinearCrossEntropyProblem& p_;
  const std::vector<int64_t>& rows_;
  const kernels::GemmProduct& product_ = cpu::gemm_amx();
  const kernels::LinearCrossEntropyTiles& kernels_ = cpu::linear_cross_entropy_tiles();
  const Tensor target_, bias_;
  const Factor<float> grad_loss_, grad_lse_;
  const int64_t features_, vocab_;
  const bool gradient_;
  int64_t segment_, segments_, chunk_;
  Tensor grad_weight_;  // the fp32 tensor to which the gradient of the weight is added
  bool fresh_ = false;  // whether grad_weight_ is still uninitialised
  LinearCrossEntropyResult out_;
};

LinearCrossEntropyByTiles::LinearCrossEntropyByTiles(const LinearCrossEntropyProblem& problem,
                                                     const std::vector<int64_t>& rows)
    : p_(problem), rows_(rows), target_(p_.target.contiguous()),
      bias_(p_.bias ? p_.bias->to(at::kFloat).mul(p_.logit_scale) : Tensor()),
      grad_loss_(p_.grad_loss, at::kFloat), grad_lse_(p_.grad_lse, at::kFloat), features_(p_.hidden.size(1)),
      vocab_(p_.vocab.expect_int()), gradient_(any(p_.mask)) {
  const int64_t fit = kSegmentBytes / (2 * features_) / kTileClasses * kTileClasses;
  segment_ = std::clamp<int64_t>(fit, kTileClasses, 512);
  segments_ = parts_of(vocab_, segment_);
  // The packed hidden states and the sums of their gradient take 8 bytes for each feature.
  const int64_t given = (p_.workspace_mb == 0 ? kDefaultWorkspaceMb : p_.workspace_mb) << 20;
  const int64_t most = std::max<int64_t>(1, given / 2 / (8 * features_) / kTokenDepth) * kTokenDepth;
  chunk_ = parts_of(parts_of(count(), parts_of(count(), most)), kTileTokens) * kTileTokens;

  const auto each = [&] { return at::zeros({p_.target.size(0)}, p_.hidden.options().dtype(at::kFloat)); };
  out_.loss = each();
  out_.lse = each();
  if (p_.mask[kHidden]) {
    gradient(kHidden) = count() == p_.hidden.size(0)
                            ? at::empty_like(p_.hidden, at::MemoryFormat::Contiguous)
                            : at::zeros_like(p_.hidden, at::MemoryFormat::Contiguous);
  }
  if (p_.mask[kWeight]) {
    grad_weight_ = p_.weight_grad ? *p_.weight_grad : floats({vocab_, features_});
    if (!p_.weight_grad) gradient(kWeight) = grad_weight_;
    fresh_ = !p_.weight_grad;
  }
  if (p_.mask[kBias]) gradient(kBias) = at::zeros({vocab_}, p_.hidden.options().dtype(at::kDouble));
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
  const Tensor x = count() == p_.hidden.size(0) ? p_.hidden.narrow(0, chunk.begin, chunk.tokens).contiguous()
                                                : p_.hidden.index_select(0, chunk.index);
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

void LinearCrossEntropyByTiles::pack_weight(int64_t segment, bool classes_are_lines, float* out) const {
  const int64_t stride = p_.weight.stride(0), n = classes(segment);
  const auto run = [&](auto pack, const auto* data) {
    const auto* from = data + first_class(segment) * stride;
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

kernels::LogitTile LinearCrossEntropyByTiles::tile_of(const float* z, int64_t first, int64_t classes,
                                                      int32_t* target, const int32_t* all) const {
  for (int64_t i = 0; i < kTileTokens; ++i) target[i] = all[i] - static_cast<int32_t>(first);
  return {z, classes, static_cast<float>(p_.logit_scale),
          bias_.defined() ? bias_.const_data_ptr<float>() + first : nullptr, target};
}

void LinearCrossEntropyByTiles::reduce(Chunk& chunk) {
  const int64_t padded = chunk.panels * kTileTokens, tile = packed(features_);
  const Tensor largest = at::full({segments_, padded}, -FLT_MAX, p_.hidden.options().dtype(at::kFloat));
  const Tensor sum = at::zeros_like(largest), at_target = at::zeros({padded}, largest.options());
  float *largests = largest.mutable_data_ptr<float>(), *sums = sum.mutable_data_ptr<float>();
  float* at_targets = at_target.mutable_data_ptr<float>();
  const float* columns = chunk.columns.const_data_ptr<float>();
  const auto* targets = chunk.target.const_data_ptr<int32_t>();
  const int64_t weight_size = segment_ / kLines * tile, size = weight_size + kTileClasses * kTileTokens;
  const Tensor scratch = floats({at::get_num_threads(), size});
  float* scratches = scratch.mutable_data_ptr<float>();
  at::parallel_for(0, segments_, 1, [&](int64_t first, int64_t last) {
    float *weight = scratches + at::get_thread_num() * size, *z = weight + weight_size;
    alignas(64) int32_t relative[kTileTokens];
    for (int64_t s = first; s < last; ++s) {
      pack_weight(s, true, weight);
      for (int64_t j = 0; j < chunk.panels; ++j) {
        const int64_t t = j * kTileTokens, at = s * padded + t;
        for (int64_t c = 0; c < classes(s); c += kTileClasses) {
          const int64_t n = std::min(kTileClasses, classes(s) - c);
          multiply(weight + c / kLines * tile, columns + j * tile, whole(n), kTileTokens, features_, z,
                   kTileTokens, false);
          kernels_.statistics(tile_of(z, first_class(s) + c, n, relative, targets + t),
                              {largests + at, sums + at, at_targets + t});
        }
      }
    }
  });
  at::parallel_for(0, chunk.panels, 8, [&](int64_t first, int64_t last) {
    for (int64_t j = first; j < last; ++j)
      kernels_.combine(segments_, padded, largests + j * kTileTokens, sums + j * kTileTokens);
  });

  chunk.lse = at::zeros_like(at_target);
  chunk.factor = at::zeros_like(at_target);
  chunk.at_target = at::zeros_like(at_target);
  float *lse = chunk.lse.mutable_data_ptr<float>(), *factor = chunk.factor.mutable_data_ptr<float>(),
        *less = chunk.at_target.mutable_data_ptr<float>();
  float *losses = out_.loss.mutable_data_ptr<float>(), *lses = out_.lse.mutable_data_ptr<float>();
  for (int64_t i = 0; i < chunk.tokens; ++i) {
    const int64_t token = rows_[chunk.begin + i];
    const double x = largests[i] + std::log(static_cast<double>(sums[i])), u = grad_loss_[token];
    lse[i] = static_cast<float>(x);
    lses[token] = lse[i];
    losses[token] = static_cast<float>(x - at_targets[i] + p_.z_loss * x * x);
    factor[i] = static_cast<float>((u * (1 + 2 * p_.z_loss * x) + grad_lse_[token]) * p_.logit_scale);
    less[i] = static_cast<float>(u * p_.logit_scale);
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
  // packed weights, the gradient of the logits of kTokenDepth tokens, and a tile of logits
  const int64_t size = segment_ / kLines * (packed(features_) + packed(kTokenDepth)) +
                       kTileClasses * kTileTokens + segment_ * 16;
  const Tensor scratch = floats({at::get_num_threads(), size});
  float* scratches = scratch.mutable_data_ptr<float>();
  for (int64_t begin = 0; begin < segments_; begin += round) {
    const int64_t end = std::min(begin + round, segments_);
    at::parallel_for(begin, end, 1, [&](int64_t first, int64_t last) {
      for (int64_t s = first; s < last; ++s) {
        add_segment(chunk, s, rights == nullptr ? nullptr : rights + (s - begin) * right_size,
                    weights == nullptr ? nullptr : weights + (s - begin) * weight_size,
                    scratches + at::get_thread_num() * size);
      }
    });
    if (p_.mask[kHidden]) add_hidden(chunk, begin, end, rights, weights);
  }
  fresh_ = false;
  if (p_.mask[kHidden]) write_hidden(chunk);
}

void LinearCrossEntropyByTiles::add_segment(const Chunk& chunk, int64_t s, float* right, float* weight_out,
                                            float* scratch) {
  const int64_t tile = packed(features_), n = classes(s), panels = parts_of(features_, kLines);
  float *weight = scratch, *left = weight + segment_ / kLines * tile,
        *z = left + segment_ / kLines * packed(kTokenDepth), *sums = z + kTileClasses * kTileTokens;
  const float* columns = chunk.columns.const_data_ptr<float>();
  const auto* targets = chunk.target.const_data_ptr<int32_t>();
  const float *lse = chunk.lse.const_data_ptr<float>(), *factor = chunk.factor.const_data_ptr<float>(),
              *less = chunk.at_target.const_data_ptr<float>();
  pack_weight(s, true, weight);
  if (weight_out != nullptr) pack_weight(s, false, weight_out);
  if (p_.mask[kBias]) std::fill_n(sums, segment_ * 16, 0.f);
  alignas(64) int32_t relative[kTileTokens];
  for (int64_t begin = 0; begin < chunk.tokens; begin += kTokenDepth) {
    const int64_t depth = std::min(kTokenDepth, chunk.tokens - begin), left_stride = packed(depth);
    for (int64_t t = begin; t < begin + depth; t += kTileTokens) {
      const int64_t j = t / kTileTokens;
      for (int64_t c = 0; c < n; c += kTileClasses) {
        const int64_t some = std::min(kTileClasses, n - c);
        multiply(weight + c / kLines * tile, columns + j * tile, whole(some), kTileTokens, features_, z,
                 kTileTokens, false);
        const int64_t bytes = j + 1 < chunk.panels ? tile * 4 / parts_of(n, kTileClasses) : 0;
        kernels_.gradient(
            tile_of(z, first_class(s) + c, some, relative, targets + t), {lse + t, factor + t, less + t},
            {p_.mask[kWeight]
                 ? left + c / kLines * left_stride + (t - begin) / kTileTokens * kLines * kTileTokens / 2
                 : nullptr,
             left_stride, right == nullptr ? nullptr : right + j * packed(n) + c / 2 * kTileTokens,
             p_.mask[kBias] ? sums + c * 16 : nullptr},
            reinterpret_cast<const char*>(columns + (j + 1) * tile) + c / kTileClasses * bytes, bytes);
      }
    }
    if (p_.mask[kWeight]) {
      multiply(left, chunk.depth.const_data_ptr<float>() + begin / kTokenDepth * panels * packed(kTokenDepth),
               n, features_, depth, grad_weight_.mutable_data_ptr<float>() + first_class(s) * features_,
               features_, !fresh_ || begin > 0);
    }
  }
  if (p_.mask[kBias]) {
    double* to = gradient(kBias).mutable_data_ptr<double>() + first_class(s);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t k = 0; k < 16; ++k) to[i] += sums[i * 16 + k];
    }
  }
}

void LinearCrossEntropyByTiles::add_hidden(const Chunk& chunk, int64_t first, int64_t last,
                                           const float* right, const float* weight) {
  const int64_t right_size = chunk.panels * packed(segment_),
                weight_size = parts_of(features_, kLines) * packed(segment_);
  float* sums = chunk.sums.mutable_data_ptr<float>();
  at::parallel_for(0, chunk.panels, 1, [&](int64_t from, int64_t to) {
    for (int64_t s = first; s < last; ++s) {
      for (int64_t j = from; j < to; ++j) {
        multiply(weight + (s - first) * weight_size,
                 right + (s - first) * right_size + j * packed(classes(s)), whole(features_), kTileTokens,
                 classes(s), sums + j * whole(features_) * kTileTokens, kTileTokens, s > 0);
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
  return gemm::multiplies_by_tiles() && tokens >= kLeastTokens && p.hidden.scalar_type() == at::kBFloat16 &&
         !p.absmax && (weight == at::kBFloat16 || weight == at::kFloat) && p.weight.stride(1) == 1 &&
         !p.lora_hidden && !p.class_weights && p.label_smoothing == 0 && p.softcap == 0 && !p.stats &&
         !p.grad_entropy && p.filter_eps == 0 && (!p.weight_grad || p.weight_grad->is_contiguous()) &&
         p.hidden.size(1) >= kLines && p.hidden.size(1) <= kMostFeatures && p.weight.size(0) >= kLines;
}

LinearCrossEntropyResult linear_cross_entropy_by_tiles(const LinearCrossEntropyProblem& problem,
                                                       const std::vector<int64_t>& rows) {
  return LinearCrossEntropyByTiles(problem, rows)();
}

}  // namespace shoestring::losses
