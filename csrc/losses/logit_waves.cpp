#include "losses/logit_waves.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "gemm/gemm.h"

namespace shoestring::losses {

using at::Tensor;

namespace {

// Splits `total` into equal parts of at most `most` (a maximum), and returns the size of a part. If there are
// several parts and `most` is at least one GEMM tile, the size is a multiple of a tile.
int64_t even_part(int64_t total, int64_t most) {
  constexpr int64_t kTile = 128;
  most = std::max<int64_t>(1, most >= kTile ? most / kTile * kTile : most);
  const int64_t parts = (total + most - 1) / most;
  if (parts <= 1) return std::max<int64_t>(1, total);
  const int64_t even = (total + parts - 1) / parts;
  return most >= kTile ? (even + kTile - 1) / kTile * kTile : even;
}

}  // namespace

LogitWaves::LogitWaves(const char* op, Head head, const Tensor& ignored, const Mask& mask, Options options)
    : op_(op), head_(std::move(head)), ignored_(ignored), mask_(mask), options_(std::move(options)),
      vocab_(head_.vocab.expect_int()) {
  TORCH_CHECK(vocab_ <= (int64_t{1} << 31) - 16, op_,
              ": weight: expected fewer than 2^31 - 16 classes on CUDA, received ", vocab_);
  // scale_ is a power of two near 1 / tokens, the factor of a mean. The gradient of the logits is stored
  // divided by scale_, since most of its elements would be zero in fp16 otherwise. scale_ is at least 2^-15,
  // so that the largest stored element, 1 / scale_, is finite in fp16.
  for (int64_t n = tokens(); options_.averaged && n > 1 && scale_ > 0x1p-15; n /= 2) scale_ /= 2;
  plan();
  if (options_.filter && any(mask)) live_ = at::empty({stride()}, head_.hidden.options().dtype(at::kByte));
}

int64_t LogitWaves::stride() const { return std::max<int64_t>(8, (vocab_ + 7) / 8 * 8); }

at::TensorOptions LogitWaves::compute() const {
  return head_.hidden.options().dtype(compute_type(head_.hidden));
}

bool LogitWaves::narrow() const {
  return any(mask_) && head_.hidden.scalar_type() != compute_type(head_.hidden);
}

// Chooses the number of tokens in a wave of logits and in a chunk of their gradient. With several chunks,
// each chunk makes a pass over the fp32 accumulator of the weight's gradient. The pass moves 8 * vocab *
// features bytes, and the chunk's three products take 6 * chunk * features * vocab flops. On an H200, with
// 16-bit inputs, the pass takes about 230 / chunk times as long as the products.
//
// By default one chunk takes all tokens if the 16-bit gradient of their logits is no larger than the
// accumulator. With one chunk the accumulator is not needed. With fp32 inputs the result itself is the
// accumulator, and the products are so slow that the additional passes for small chunks take little time in
// comparison.
void LogitWaves::plan() {
  const int64_t row = stride() * static_cast<int64_t>(compute().dtype().itemsize()),
                logits = options_.buffers * row;
  const int64_t features = head_.hidden.size(1);
  if (const int64_t bytes = options_.workspace_mb << 20; bytes > 0) {
    wave_ = narrow() ? std::max<int64_t>(1, bytes / 4 / row) : bytes / logits;
    chunk_ = (bytes - wave_ * logits) / (row / 2);
  } else {
    wave_ = std::max<int64_t>(narrow() ? 128 : 1024, (int64_t{256} << 20) / logits);
    chunk_ = !mask_[kWeight] ? 1024 : tokens() <= 2 * features ? tokens() : std::max<int64_t>(2048, features);
  }
  if (!narrow()) chunk_ = wave_;
  chunk_ = even_part(tokens(), std::max(wave_, chunk_));
  wave_ = even_part(chunk_, wave_);
}

Tensor LogitWaves::padded(const std::optional<Tensor>& t) const {
  if (!t) return {};
  return at::constant_pad_nd(t->to(compute_type(head_.hidden)), {0, stride() - vocab_}).contiguous();
}

Tensor LogitWaves::counted(const Tensor& t, int64_t begin, int64_t count) const {
  const Tensor part = t.narrow(0, begin, count);
  return ignored_.defined() ? part.masked_fill(ignored_.narrow(0, begin, count), 0) : part;
}

Tensor LogitWaves::buffer() const { return at::empty({std::min(wave_, tokens()), stride()}, compute()); }

void LogitWaves::write_logits(const Tensor& z, const Tensor& x,
                              const quantization::BaseWeight& weight) const {
  weight.for_each_panel([&](int64_t v, const Tensor& panel) {
    gemm::gemm(z.narrow(1, v, panel.size(0)), x, panel.t(), /*beta=*/0, options_.logit_scale);
  });
}

void LogitWaves::add_gradients(const Chunk& chunk, const quantization::BaseWeight& weight,
                               const Tensor& lora_B, Gradients& sums) const {
  const Tensor &grad = chunk.grad, &x = chunk.x;
  const int64_t begin = chunk.begin;
  const double scale = scale_ * options_.logit_scale;
  // If the weight comes in several panels, the gradient of hidden is summed over the panels in fp32 and
  // rounded once.
  if (mask_[kHidden]) {
    const Tensor result = sums[kHidden].narrow(0, begin, grad.size(0));
    const Tensor sum = weight.one_panel() ? result : at::empty(result.sizes(), compute());
    weight.for_each_panel([&](int64_t v, const Tensor& panel) {
      gemm::gemm(sum, grad.narrow(1, v, panel.size(0)), panel, /*beta=*/v == 0 ? 0 : 1, scale);
    });
    if (!weight.one_panel()) result.copy_(sum);
  }
  const double beta = begin == 0 && !options_.weight_grad && !live_.defined() ? 0 : 1;
  if (mask_[kWeight]) gemm::gemm(sums[kWeight], grad.t(), x, beta, scale);
  if (mask_[kBias]) sums[kBias].add_(grad.sum(0, /*keepdim=*/false, compute_type(x)), scale);
  if (mask_[kLoraHidden])
    gemm::gemm(sums[kLoraHidden].narrow(0, begin, grad.size(0)), grad, lora_B, /*beta=*/0, scale);
  if (mask_[kLoraB]) gemm::gemm(sums[kLoraB], grad.t(), chunk.lora_hidden, /*beta=*/1, scale);
}

// Computes the same gradients as add_gradients(), but only for the given classes. Processes the weights of
// these classes in groups of 64 MiB, since there can still be many classes.
void LogitWaves::add_live_gradients(const Chunk& chunk, const Tensor& classes, const Tensor& lora_B,
                                    Gradients& sums) const {
  const Tensor &x = chunk.x, &lora_hidden = chunk.lora_hidden;
  const double scale = scale_ * options_.logit_scale;
  const auto sum = [&](int i, int64_t columns) {
    return mask_[i] ? at::zeros({x.size(0), columns}, compute()) : Tensor();
  };
  const Tensor hidden = sum(kHidden, x.size(1)),
               of_lora_hidden = sum(kLoraHidden, lora_hidden.defined() ? lora_hidden.size(1) : 0);
  const int64_t row = std::max<int64_t>(1, x.size(1) * static_cast<int64_t>(x.itemsize()));
  const int64_t step = std::max<int64_t>(128, (int64_t{64} << 20) / row);
  for (int64_t first = 0; first < classes.size(0); first += step) {
    const Tensor these = classes.narrow(0, first, std::min(step, classes.size(0) - first));
    const Tensor grad = chunk.grad.index_select(1, these);  // shape (count, classes)
    const auto add = [&](int i, const Tensor& other) {
      const Tensor product = at::empty({these.size(0), other.size(1)}, compute());
      gemm::gemm(product, grad.t(), other, /*beta=*/0, scale);
      sums[i].index_add_(0, these, product.to(sums[i].scalar_type()));
    };
    if (mask_[kHidden]) gemm::gemm(hidden, grad, head_.weight.index_select(0, these), /*beta=*/1, scale);
    if (mask_[kLoraHidden])
      gemm::gemm(of_lora_hidden, grad, lora_B.index_select(0, these), /*beta=*/1, scale);
    if (mask_[kWeight]) add(kWeight, x);
    if (mask_[kBias])
      sums[kBias].index_add_(0, these, grad.sum(0, /*keepdim=*/false, compute_type(x)), scale);
    if (mask_[kLoraB]) add(kLoraB, lora_hidden);
  }
  if (mask_[kHidden]) sums[kHidden].narrow(0, chunk.begin, x.size(0)).copy_(hidden);
  if (mask_[kLoraHidden]) sums[kLoraHidden].narrow(0, chunk.begin, x.size(0)).copy_(of_lora_hidden);
}

Gradients LogitWaves::run(const StartRows& start_rows) const {
  const Tensor& hidden = head_.hidden;
  const auto dtype = hidden.scalar_type();
  const quantization::BaseWeight weight = head_.base(Backend::kCuda, op_, dtype);
  const Tensor lora_hidden_rows = head_.lora_hidden ? head_.lora_hidden->to(dtype) : Tensor(),
               lora_B = head_.lora_B ? head_.lora_B->to(dtype) : Tensor();
  const bool gradient = any(mask_);
  const Tensor logits = buffer();
  Tensor grad_logits = gradient ? logits : Tensor();
  if (narrow()) grad_logits = at::empty({std::min(chunk_, tokens()), stride()}, hidden.options());

  const auto start = [&](at::IntArrayRef shape, at::TensorOptions options) {
    return tokens() == 0 || live_.defined() ? at::zeros(shape, options) : at::empty(shape, options);
  };
  Gradients gradients;
  if (mask_[kHidden]) gradients[kHidden] = at::empty_like(hidden, at::MemoryFormat::Contiguous);
  // With several chunks, the gradient of the weight is summed in fp32 and rounded once. A single chunk writes
  // the result directly.
  if (mask_[kWeight]) {
    const auto type = chunk_ < tokens() ? compute() : hidden.options();
    gradients[kWeight] = options_.weight_grad ? *options_.weight_grad : start(head_.weight.sizes(), type);
  }
  if (mask_[kBias]) gradients[kBias] = at::zeros({vocab_}, compute());
  if (mask_[kLoraHidden])
    gradients[kLoraHidden] = at::empty({tokens(), lora_hidden_rows.size(1)}, hidden.options());
  if (mask_[kLoraB]) gradients[kLoraB] = at::zeros(lora_B.sizes(), compute());

  for (int64_t begin = 0; begin < tokens(); begin += chunk_) {
    const int64_t count = std::min(chunk_, tokens() - begin);
    const Tensor x = counted(hidden, begin, count),
                 lora_hidden =
                     lora_hidden_rows.defined() ? counted(lora_hidden_rows, begin, count) : Tensor();
    if (live_.defined()) live_.zero_();
    for (int64_t first = 0; first < count; first += wave_) {
      const int64_t some = std::min(wave_, count - first);
      const Tensor z = logits.narrow(0, 0, some);
      write_logits(z, x.narrow(0, first, some), weight);
      if (lora_hidden.defined()) {
        gemm::gemm(z.narrow(1, 0, vocab_), lora_hidden.narrow(0, first, some), lora_B.t(), /*beta=*/1,
                   options_.logit_scale);
      }
      start_rows(z, gradient ? grad_logits.narrow(0, first, some) : Tensor(), begin + first);
    }
    if (!gradient) continue;
    const Chunk chunk{grad_logits.narrow(0, 0, count).narrow(1, 0, vocab_), x, lora_hidden, begin};
    // nonzero() waits for the GPU, and nothing else here does. The host must know how many classes are
    // marked, because this number is a size of the matrix products.
    const Tensor classes = live_.defined() ? live_.narrow(0, 0, vocab_).nonzero().squeeze(1) : Tensor();
    if (classes.defined() && classes.size(0) < vocab_ / 2) {
      add_live_gradients(chunk, classes, lora_B, gradients);
    } else {
      add_gradients(chunk, weight, lora_B, gradients);
    }
  }
  const auto round_to = [&](int i, const OptionalTensor& like) {
    if (mask_[i]) gradients[i] = gradients[i].to(like->scalar_type());
  };
  if (!options_.weight_grad) round_to(kWeight, head_.weight);
  round_to(kBias, head_.bias);
  round_to(kLoraHidden, head_.lora_hidden);
  round_to(kLoraB, head_.lora_B);
  return gradients;
}

}  // namespace shoestring::losses
