// Matrix products on the CPU. The depth of a product is its inner dimension, over which it sums. The longer
// side of the result is divided into blocks. Each thread packs the operand panels of its own blocks, which
// fit the L2 cache. The panels of the shorter side are packed once and shared by all threads, for as large a
// range of the depth as fits into kSharedBytes. The larger operand is thus read from memory only once, and
// the threads synchronise only after each such range.

#include <algorithm>
#include <mutex>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include "core/huge_pages.h"
#include "gemm/gemm.h"
#include "gemm/gemm_table.h"
#include "gemm/products.h"
#include "gemm/skinny_gemm_table.h"

namespace shoestring::gemm {
namespace {

using at::Tensor;

// Maximum depth of a packed panel. The sums of a tile restart with each panel, so rounding errors grow with
// the square root of this depth instead of the whole depth. A panel of 32 columns takes 24 KiB and stays in
// the L1 cache.
constexpr int64_t kDepth = 192;
constexpr int64_t kBlockBytes = int64_t{256} << 10;  // limit in bytes for the packed panels of each thread
// Limit in bytes for the part of the result that a block covers. The products over successive ranges of the
// depth are added to this part.
constexpr int64_t kResultBytes = int64_t{768} << 10;
// limit in bytes for the packed panels that all threads share
constexpr int64_t kSharedBytes = int64_t{8} << 20;
// maximum number of columns of b for which a product a b runs without packing
constexpr int64_t kSkinny = 48;
// if a product has fewer rows, fewer columns or a smaller depth than this, packing takes as long as
// multiplying
constexpr int64_t kFewLines = 8;

// One operand of a matrix product, divided into panels of `width` lines. A line is a row of a or a column of
// b.
struct Side {
  Side(const kernels::GemmProduct& product, const Tensor& matrix, int line_dim, int64_t width)
      : lines(matrix.size(line_dim)), width(width), panels(parts_of(lines, width)), product(product),
        matrix(readable(matrix)) {
    line_stride = lines == 1 ? 1 : this->matrix.stride(line_dim);
    depth_stride = matrix.size(1 - line_dim) == 1 ? 1 : this->matrix.stride(1 - line_dim);
  }

  // Returns the size of a packed panel in fp32 elements.
  int64_t packed(int64_t depth) const { return kernels::packed_size(depth, product.steps, width); }

  // Packs the panels [first, last), restricted to the depths [begin, begin + depth), into `out`.
  void pack(int64_t first, int64_t last, int64_t begin, int64_t depth, float* out) const {
    const int64_t line = first * width, count = std::min(last * width, lines) - line;
    const int64_t offset = line * line_stride + begin * depth_stride;
    const void* data = matrix.const_data_ptr();
    if (matrix.scalar_type() == at::kFloat) {
      product.pack_float(static_cast<const float*>(data) + offset, count, depth, line_stride, depth_stride,
                         width, out);
    } else {
      (matrix.scalar_type() == at::kHalf ? product.pack_fp16 : product.pack_bf16)(
          static_cast<const uint16_t*>(data) + offset, count, depth, line_stride, depth_stride, width, out);
    }
  }

  int64_t lines, width, panels;

 private:
  static Tensor readable(const Tensor& m) {
    const auto single = [&](int dim) { return m.size(dim) == 1 || m.stride(dim) == 1; };
    return single(0) || single(1) ? m : m.contiguous();
  }

  const kernels::GemmProduct& product;
  Tensor matrix;
  int64_t line_stride, depth_stride;
};

// Memory for packed panels, which is kept and reused by later products. In a small product, page faults in
// new memory take longer than packing. Freeing and reallocating this memory would fragment the heap. The
// process keeps at most kKept bytes, however many threads multiply.
class Scratch {
 public:
  explicit Scratch(int64_t count) : buffer_(take(count)) {}
  ~Scratch() {
    const std::lock_guard lock(kept().mutex);
    auto& buffers = kept().buffers;
    size_t bytes = buffer_.nbytes();
    for (const Tensor& t : buffers) bytes += t.nbytes();
    if (bytes <= kKept) buffers.push_back(std::move(buffer_));
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* data() const { return buffer_.mutable_data_ptr<float>(); }

 private:
  static constexpr size_t kKept = size_t{2} * kSharedBytes;
  struct Kept {
    std::mutex mutex;
    std::vector<Tensor> buffers;
  };
  static Kept& kept() {
    static auto& all = *new Kept;  // never destroyed, because a thread may multiply while the process ends
    return all;
  }
  static Tensor take(int64_t count) {
    {
      const std::lock_guard lock(kept().mutex);
      auto& buffers = kept().buffers;
      const auto fits = [&](const Tensor& t) { return t.numel() >= count; };
      const auto found = std::find_if(buffers.begin(), buffers.end(), fits);
      if (found != buffers.end()) {
        const Tensor buffer = std::move(*found);
        buffers.erase(found);
        return buffer;
      }
      buffers.clear();  // no kept buffer is large enough, so all of them are freed
    }
    return in_huge_pages(at::empty({count}, at::kFloat));
  }

  Tensor buffer_;
};

void multiply(const kernels::GemmProduct& product, float* c, int64_t stride, const Side& a, const Side& b,
              int64_t depth, float alpha, float beta) {
  const bool share_a = a.lines <= b.lines;
  const Side &shared = share_a ? a : b, &own = share_a ? b : a;
  const int64_t threads = at::get_num_threads();

  const int64_t most = kDepth * product.steps, even = parts_of(depth, parts_of(depth, most));
  const int64_t piece = parts_of(even, product.steps) * product.steps;
  const int64_t fit =
      kSharedBytes / static_cast<int64_t>(sizeof(float)) / (shared.panels * shared.packed(piece));
  const int64_t round = piece * std::max<int64_t>(1, std::min(fit, parts_of(depth, piece)));
  // Blocks have equal size, and each thread gets equally many. If there are fewer blocks than threads,
  // several threads share a block and divide the shorter side of the result among them.
  const int64_t fit_packed = kBlockBytes / static_cast<int64_t>(sizeof(float)) / own.packed(piece);
  const int64_t fit_result = kResultBytes / static_cast<int64_t>(sizeof(float)) / (own.width * shared.lines);
  const int64_t block_fit = std::max<int64_t>(1, std::min(fit_packed, fit_result));
  const int64_t block = parts_of(own.panels, parts_of(parts_of(own.panels, block_fit), threads) * threads);
  const int64_t blocks = parts_of(own.panels, block), parts = parts_of(threads, blocks);
  const int64_t part = parts_of(shared.panels, parts);

  const int64_t piece_size = shared.panels * shared.packed(piece), own_size = block * own.packed(piece);
  const Scratch for_all(round / piece * piece_size), for_one(threads * own_size);
  float *all = for_all.data(), *one = for_one.data();

  for (int64_t begin = 0; begin < depth; begin += round) {
    const int64_t end = std::min(depth, begin + round);
    // Calls body(d, count, panels) for each piece [d, d + count) of the depth range [begin, end). `panels`
    // points to the shared panels of that piece.
    const auto for_each_piece = [&](auto body) {
      for (int64_t d = begin; d < end; d += piece) {
        body(d, std::min(piece, end - d), all + (d - begin) / piece * piece_size);
      }
    };
    at::parallel_for(0, shared.panels, 1, [&](int64_t first, int64_t last) {
      for_each_piece([&](int64_t d, int64_t count, float* panels) {
        shared.pack(first, last, d, count, panels + first * shared.packed(count));
      });
    });
    at::parallel_for(0, blocks * parts, 1, [&](int64_t first_task, int64_t last_task) {
      float* mine = one + at::get_thread_num() * own_size;
      for (int64_t task = first_task; task < last_task; ++task) {
        const int64_t first = task / parts * block, last = std::min(first + block, own.panels);
        const int64_t from = std::min(task % parts * part, shared.panels),
                      to = std::min(from + part, shared.panels);
        if (from == to) continue;
        const int64_t own_line = first * own.width,
                      own_lines = std::min(last * own.width, own.lines) - own_line;
        const int64_t line = from * shared.width, lines = std::min(to * shared.width, shared.lines) - line;
        for_each_piece([&](int64_t d, int64_t count, const float* panels) {
          own.pack(first, last, d, count, mine);
          const float *theirs = panels + from * shared.packed(count), now = d == 0 ? beta : 1;
          if (share_a) {
            product.multiply(theirs, mine, lines, own_lines, count, c + line * stride + own_line, stride,
                             alpha, now, false);
          } else {
            product.multiply(mine, theirs, own_lines, lines, count, c + own_line * stride + line, stride,
                             alpha, now, true);
          }
        });
      }
    });
  }
}

// Returns whether multiply_skinny() can compute a b: b has few columns, a has many rows, and each row of a is
// contiguous.
bool is_skinny(const Tensor& a, const Tensor& b) {
  return b.size(1) <= kSkinny && a.size(0) >= 4 * b.size(1) && (a.stride(1) == 1 || a.size(1) == 1);
}

void multiply_skinny(const Tensor& c, const Tensor& a, const Tensor& b, float alpha, float beta) {
  const auto& kernels = cpu::skinny_gemm();
  const Tensor vectors = b.t().to(at::kFloat).contiguous();
  const int64_t n = b.size(1), k = a.size(1), stride = a.stride(0), stride_c = c.stride(0);
  const float* from = vectors.const_data_ptr<float>();
  float* to = c.mutable_data_ptr<float>();
  at::parallel_for(0, a.size(0), std::max<int64_t>(4, (int64_t{1} << 16) / (k * n + 1)),
                   [&](int64_t first, int64_t last) {
                     const auto run = [&](auto multiply, const auto* rows) {
                       multiply(rows + first * stride, stride, last - first, from, n, k,
                                to + first * stride_c, stride_c, alpha, beta);
                     };
                     const void* rows = a.const_data_ptr();
                     switch (a.scalar_type()) {
                       case at::kFloat:
                         return run(kernels.multiply_float, static_cast<const float*>(rows));
                       case at::kBFloat16:
                         return run(kernels.multiply_bf16, static_cast<const uint16_t*>(rows));
                       default:
                         return run(kernels.multiply_fp16, static_cast<const uint16_t*>(rows));
                     }
                   });
}

// Returns whether the product a b may use the CPU's bf16 instructions.
bool by_bf16_units(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16 && multiplies_bf16();
}

bool has_amx() {
#if defined(__x86_64__)
  static const bool units =
      __builtin_cpu_supports("amx-bf16") && at::native::cpublas::could_pack(at::kBFloat16);
  return units;
#else
  return false;
#endif
}

// Computes c (m, n) = beta c + alpha a b for bf16 matrices with oneDNN's AMX kernels, which accumulate and
// write fp32. The rows of c must be contiguous. A task keeps a panel of a (256 x 1,024: 512 KiB) and a packed
// block of b (1,024 x 64: 128 KiB) in the L2 cache.
void multiply_amx(const Tensor& c, const Tensor& a, const Tensor& b, double alpha, double beta) {
  namespace blas = at::native::cpublas;
  constexpr int64_t kRows = 256, kColumns = 64,
                    kPiece = 1024;  // kColumns is the maximum width that pack() accepts
  const int64_t m = a.size(0), n = b.size(1), odd = a.size(1) % 2, depth = a.size(1) + odd;
  // AMX adds products in pairs, so an odd depth is padded with zeros.
  const Tensor left = odd != 0 ? at::constant_pad_nd(a, {0, 1}) : a.contiguous();
  const Tensor right = odd != 0 ? at::constant_pad_nd(b, {0, 0, 0, 1}) : b.contiguous();
  const int64_t blocks = parts_of(n, kColumns), tiles = parts_of(m, kRows);
  const Tensor packed = at::empty({blocks, depth, kColumns}, right.options());
  const auto* from = right.const_data_ptr<at::BFloat16>();
  auto* panels = packed.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      blas::pack(depth, std::min(kColumns, n - block * kColumns), n, kColumns, at::kBFloat16, at::kBFloat16,
                 from + block * kColumns, panels + block * depth * kColumns);
    }
  });
  const Tensor sum = alpha == 1 ? c : at::empty({m, n}, c.options());
  const bool add = alpha == 1 && beta != 0;
  if (add && beta != 1) c.mul_(beta);
  const auto* rows = left.const_data_ptr<at::BFloat16>();
  float* out = sum.mutable_data_ptr<float>();
  const int64_t stride = sum.stride(0);
  // A task is a tile of rows and a group of column blocks. There are about four tasks per thread, if there
  // are enough blocks.
  const int64_t groups = std::min(blocks, parts_of(4 * at::get_num_threads(), tiles));
  at::parallel_for(0, tiles * groups, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t row = task / groups * kRows, group = task % groups;
      for (int64_t d = 0; d < depth; d += kPiece) {
        for (int64_t block = group * blocks / groups; block < (group + 1) * blocks / groups; ++block) {
          const int64_t column = block * kColumns;
          blas::brgemm(std::min(kRows, m - row), std::min(kColumns, n - column), std::min(kPiece, depth - d),
                       depth, kColumns, stride, add || d > 0, rows + row * depth + d,
                       panels + (block * depth + d) * kColumns, out + row * stride + column);
        }
      }
    }
    blas::brgemm_release();
  });
  if (alpha != 1) beta == 0 ? c.copy_(sum).mul_(alpha) : c.mul_(beta).add_(sum, alpha);
}

}  // namespace

bool gemm_widens(at::ScalarType type) { return type == at::kFloat && cpu::gemm().beats_library; }

void gemm_cpu(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha) {
  if (out.numel() == 0) return;
  const auto wide = compute_type(a);
  const auto in_place = [&](int dim) {
    return out.scalar_type() == wide && (out.stride(dim) == 1 || out.size(dim) == 1);
  };
  if (!in_place(1) && in_place(0)) return gemm_cpu(out.t(), b.t(), a.t(), beta, alpha);
  Tensor c = in_place(1) ? out
             : beta == 0 ? at::empty(out.sizes(), out.options().dtype(wide))
                         : out.to(wide).contiguous();
  const bool few = std::min({a.size(0), b.size(1), a.size(1)}) < kFewLines;
  const bool widen = a.scalar_type() != wide || b.scalar_type() != wide;
  if (!gemm_widens(wide) || (few && !widen) || a.size(1) == 0) {
    at::addmm_out(c, c, a.to(wide), b.to(wide), beta, alpha);
  } else if (is_skinny(a, b)) {
    multiply_skinny(c, a, b, static_cast<float>(alpha), static_cast<float>(beta));
  } else {
    const auto& kernels = cpu::gemm();
    const auto& product = by_bf16_units(a, b) ? kernels.bf16 : kernels.fp32;
    multiply(product, c.mutable_data_ptr<float>(), c.stride(0), Side(product, a, 0, kernels.rows),
             Side(product, b, 1, kernels.columns), a.size(1), static_cast<float>(alpha),
             static_cast<float>(beta));
  }
  if (!c.is_same(out)) out.copy_(c);
}

void gemm_rounded(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha) {
  if (!by_bf16_units(a, b) || !(has_amx() || a.size(0) < kFewLines)) return gemm_cpu(out, a, b, beta, alpha);
  Tensor c = out;
  if (out.scalar_type() == at::kBFloat16) {
    at::addmm_out(c, out, a, b, beta, alpha);
    return;
  }
  // With AMX, a product that is added to an fp32 `out` is not rounded to bf16, because the rounding errors of
  // several products would add up. A product that overwrites `out` may be rounded, as PyTorch's products are.
  const bool contiguous = out.scalar_type() == at::kFloat && (out.stride(1) == 1 || out.size(1) == 1);
  if (has_amx() && contiguous && a.size(1) > 0 && (beta != 0 || a.size(0) >= a.size(1))) {
    return multiply_amx(out, a, b, alpha, beta);
  }
  // Number of rows of the product that are computed at a time. The product of these rows stays in the cache
  // until it is added to `out`.
  const int64_t step = std::max<int64_t>(64, kSharedBytes / 2 / std::max<int64_t>(1, b.size(1)));
  for (int64_t i = 0; i < a.size(0); i += step) {
    const int64_t rows = std::min(step, a.size(0) - i);
    const Tensor product = at::mm(a.narrow(0, i, rows), b);
    Tensor part = c.narrow(0, i, rows);
    beta == 0 ? part.copy_(product).mul_(alpha) : part.mul_(beta).add_(product, alpha);
  }
}

void gemm_in(at::ScalarType compute, const Tensor& out, const Tensor& a, const Tensor& b, double beta,
             double alpha) {
  if (compute == at::kBFloat16) return gemm_rounded(out, a.to(compute), b.to(compute), beta, alpha);
  gemm_cpu(out, a, b, beta, alpha);
}

}  // namespace shoestring::gemm
