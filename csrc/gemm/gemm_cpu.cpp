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

#include "core/huge_pages.h"
#include "core/tensors.h"
#include "core/threads.h"
#include "gemm/gemm.h"
#include "gemm/gemm_table.h"
#include "gemm/products.h"
#include "gemm/skinny_gemm_table.h"

namespace shoestring::gemm {
namespace {

using at::Tensor;

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
  Side(const kernels::GemmProduct& product, const kernels::GemmPack& functions, const Tensor& matrix,
       int line_dim, int64_t width)
      : lines(matrix.size(line_dim)), width(width), panels(parts_of(lines, width)), product(product),
        functions(functions), matrix(readable(matrix)) {
    line_stride = lines == 1 ? 1 : this->matrix.stride(line_dim);
    depth_stride = matrix.size(1 - line_dim) == 1 ? 1 : this->matrix.stride(1 - line_dim);
  }

  // Returns the size of a packed panel in fp32 elements.
  int64_t packed(int64_t depth) const {
    return kernels::packed_size(parts_of(depth, product.depth_multiple) * product.depth_multiple,
                                product.steps, width);
  }

  // Packs the panels [first, last), restricted to the depths [begin, begin + depth), into `out`.
  void pack(int64_t first, int64_t last, int64_t begin, int64_t depth, float* out) const {
    const int64_t line = first * width, count = std::min(last * width, lines) - line;
    const int64_t offset = line * line_stride + begin * depth_stride;
    const void* data = matrix.const_data_ptr();
    if (matrix.scalar_type() == at::kFloat) {
      functions.from_float(static_cast<const float*>(data) + offset, count, depth, line_stride, depth_stride,
                           width, out);
    } else {
      (matrix.scalar_type() == at::kHalf ? functions.from_fp16 : functions.from_bf16)(
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
  const kernels::GemmPack functions;
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

// A result of a matrix product, fp32 or 16-bit. The elements of a row are contiguous.
struct Result {
  explicit Result(const Tensor& out)
      : wide(out.scalar_type() == at::kFloat ? out.mutable_data_ptr<float>() : nullptr),
        narrow{wide == nullptr ? bits(out) : nullptr, out.stride(0), out.scalar_type() == at::kHalf} {}

  // Widens `lines` x `columns` elements from (line, column) on and stores them in `to`.
  void read(int64_t line, int64_t column, int64_t lines, int64_t columns, float* to, int64_t stride) const {
    for (int64_t i = 0; i < lines; ++i) {
      const uint16_t* from = narrow.data + (line + i) * narrow.stride + column;
      if (narrow.fp16) {
        std::copy_n(reinterpret_cast<const at::Half*>(from), columns, to + i * stride);
      } else {
        std::copy_n(reinterpret_cast<const at::BFloat16*>(from), columns, to + i * stride);
      }
    }
  }

  float* wide;
  kernels::GemmNarrow narrow;
};

// Returns the depth of the panels of a product, and the depth of a round, after which the threads
// synchronise.
struct Depths {
  Depths(const kernels::GemmProduct& product, const Side& shared, int64_t depth) {
    const int64_t even = parts_of(depth, parts_of(depth, product.most_depth));
    piece = parts_of(even, product.depth_multiple) * product.depth_multiple;
    const int64_t fit =
        kSharedBytes / static_cast<int64_t>(sizeof(float)) / (shared.panels * shared.packed(piece));
    round = piece * std::max<int64_t>(1, std::min(fit, parts_of(depth, piece)));
  }
  int64_t piece, round;
};

// Returns whether multiply() can round its result to 16 bits: the sum over the depth is complete in one
// round.
bool rounds_results(const kernels::GemmProduct& product, const Side& a, const Side& b, int64_t depth) {
  return Depths(product, a.lines <= b.lines ? a : b, depth).round >= depth;
}

void multiply(const kernels::GemmProduct& product, const Result& out, const Side& a, const Side& b,
              int64_t depth, float alpha, float beta) {
  const bool share_a = a.lines <= b.lines;
  const Side &shared = share_a ? a : b, &own = share_a ? b : a;
  const int64_t threads = threads_for(static_cast<double>(a.lines * b.lines) * static_cast<double>(depth));
  const auto [piece, round] = Depths(product, shared, depth);

  // Blocks have equal size, and each thread gets equally many. If there are fewer blocks than threads,
  // several threads share a block and divide the shorter side of the result among them.
  const int64_t fit_packed = kBlockBytes / static_cast<int64_t>(sizeof(float)) / own.packed(piece);
  const int64_t fit_result = kResultBytes / static_cast<int64_t>(sizeof(float)) / (own.width * shared.lines);
  const int64_t block_fit =
      std::max<int64_t>(1, product.in_groups ? fit_packed : std::min(fit_packed, fit_result));
  const int64_t block = parts_of(own.panels, parts_of(parts_of(own.panels, block_fit), threads) * threads);
  const int64_t blocks = parts_of(own.panels, block), parts = parts_of(threads, blocks);
  const int64_t part = parts_of(shared.panels, parts);
  // A task computes the result for a group of shared panels over all pieces of the round before the next
  // group, so that this part of the result stays in the L2 cache. The task keeps its own panels of all
  // pieces.
  const bool sums = round > piece || (out.wide == nullptr && beta != 0);
  const int64_t group_fit =
      kResultBytes / static_cast<int64_t>(sizeof(float)) / (block * own.width * shared.width);
  const int64_t group = product.in_groups && sums ? std::clamp<int64_t>(group_fit, 1, part) : part;

  const int64_t piece_size = shared.panels * shared.packed(piece), own_piece = block * own.packed(piece);
  const int64_t own_size = (group < part ? round / piece : 1) * own_piece;
  // a task's sums, if they are not kept in the result
  const int64_t sum_stride = (share_a ? block * own.width : group * shared.width);
  const int64_t sum_size = out.wide == nullptr && sums ? block * own.width * group * shared.width : 0;
  const Scratch for_all(round / piece * piece_size), for_one(threads * (own_size + sum_size));
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
    at::parallel_for(0, shared.panels, parts_of(shared.panels, threads), [&](int64_t first, int64_t last) {
      for_each_piece([&](int64_t d, int64_t count, float* panels) {
        shared.pack(first, last, d, count, panels + first * shared.packed(count));
      });
    });
    // Computes the lines of the own panels [first, last) and of the shared panels [from, to).
    const auto compute = [&](int64_t first, int64_t last, int64_t from, int64_t to, bool pack, float* mine) {
      const int64_t own_line = first * own.width,
                    own_lines = std::min(last * own.width, own.lines) - own_line;
      const int64_t line = from * shared.width, lines = std::min(to * shared.width, shared.lines) - line;
      const int64_t row = share_a ? line : own_line, column = share_a ? own_line : line;
      const int64_t rows = share_a ? lines : own_lines, columns = share_a ? own_lines : lines;
      const bool wide = out.wide != nullptr;
      const int64_t stride = wide ? out.narrow.stride : sum_stride;
      float* c = wide ? out.wide + row * stride + column : mine + own_size;
      if (!wide && beta != 0) out.read(row, column, rows, columns, c, stride);
      const kernels::GemmNarrow rounded{wide ? nullptr : out.narrow.data + row * out.narrow.stride + column,
                                        out.narrow.stride, out.narrow.fp16};
      for_each_piece([&](int64_t d, int64_t count, const float* panels) {
        float* packed = mine + (group < part ? (d - begin) / piece * own_piece : 0);
        if (pack) own.pack(first, last, d, count, packed);
        const float *theirs = panels + from * shared.packed(count), now = d == 0 ? beta : 1;
        product.multiply(share_a ? theirs : packed, share_a ? packed : theirs, rows, columns, count, c,
                         stride, alpha, now, wide || d + count < depth ? nullptr : &rounded, !share_a);
      });
    };
    at::parallel_for(
        0, blocks * parts, parts_of(blocks * parts, threads), [&](int64_t first_task, int64_t last_task) {
          float* mine = one + at::get_thread_num() * (own_size + sum_size);
          for (int64_t task = first_task; task < last_task; ++task) {
            const int64_t first = task / parts * block, last = std::min(first + block, own.panels);
            const int64_t start = std::min(task % parts * part, shared.panels),
                          stop = std::min(start + part, shared.panels);
            for (int64_t from = start; from < stop; from += group) {
              compute(first, last, from, std::min(from + group, stop), from == start || group == part, mine);
            }
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
  at::parallel_for(0, a.size(0), std::max<int64_t>(4, row_grain(k * (4 + n))),
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

// Returns the functions for a product of matrices whose elements are multiplied in the dtype `compute`, fp32
// or bf16. Returns null if this CPU cannot multiply bf16 numbers.
const kernels::GemmProduct* product_for(at::ScalarType compute) {
  if (compute != at::kBFloat16) return &cpu::gemm().fp32;
  return multiplies_by_tiles() ? &cpu::gemm_amx() : multiplies_bf16() ? &cpu::gemm().bf16 : nullptr;
}

// Computes out = beta * out + alpha * a b with packed panels. `out` is fp32 or 16-bit.
void multiply_packed(const kernels::GemmProduct& product, const Tensor& out, const Tensor& a, const Tensor& b,
                     double beta, double alpha) {
  const Side rows(product, product.rows, a, 0, product.width_a);
  const Side columns(product, {product.pack_float, product.pack_bf16, product.pack_fp16}, b, 1,
                     product.width_b);
  const bool direct = out.stride(1) == 1 || out.size(1) == 1;
  const bool whole =
      direct && (out.scalar_type() == at::kFloat || rounds_results(product, rows, columns, a.size(1)));
  const Tensor c = whole       ? out
                   : beta == 0 ? at::empty(out.sizes(), out.options().dtype(at::kFloat))
                               : out.to(at::kFloat).contiguous();
  multiply(product, Result(c), rows, columns, a.size(1), static_cast<float>(alpha), static_cast<float>(beta));
  if (!whole) out.copy_(c);
}

}  // namespace

bool gemm_widens(at::ScalarType type) { return type == at::kFloat && cpu::gemm().beats_library; }

void gemm_in(at::ScalarType compute, const Tensor& out, const Tensor& a, const Tensor& b, double beta,
             double alpha) {
  if (out.numel() == 0) return;
  if (out.stride(1) != 1 && out.size(1) != 1 && (out.stride(0) == 1 || out.size(0) == 1)) {
    return gemm_in(compute, out.t(), b.t(), a.t(), beta, alpha);
  }
  const auto wide = compute_type(a);
  const int64_t least = std::min({a.size(0), b.size(1), a.size(1)});
  const bool rounds = compute == at::kBFloat16;
  // A product of two bf16 numbers is exact in fp32, so bf16 operands are multiplied by the bf16 units.
  const bool narrow = a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16;
  const auto* product = product_for(narrow || rounds ? at::kBFloat16 : wide);
  if (rounds && product == nullptr) {
    return gemm_in(wide, out, a.to(compute), b.to(compute), beta, alpha);
  }
  if (product == nullptr) product = product_for(wide);
  const bool widen = a.scalar_type() != wide || b.scalar_type() != wide;
  if (!gemm_widens(wide) || (least < kFewLines && !widen && !rounds) || a.size(1) == 0) {
    const bool in_place = out.scalar_type() == wide;
    Tensor c = in_place ? out : out.to(wide);
    at::addmm_out(c, c, a.to(wide), b.to(wide), beta, alpha);
    if (!in_place) out.copy_(c);
  } else if (is_skinny(a, b)) {
    const auto operand = [&](const Tensor& t) { return rounds ? t.to(compute) : t; };
    const bool in_place = out.scalar_type() == at::kFloat && (out.stride(1) == 1 || out.size(1) == 1);
    const Tensor c = in_place ? out : out.to(at::kFloat).contiguous();
    multiply_skinny(c, operand(a), operand(b), static_cast<float>(alpha), static_cast<float>(beta));
    if (!in_place) out.copy_(c);
  } else {
    multiply_packed(*product, out, a, b, beta, alpha);
  }
}

void gemm_cpu(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha) {
  gemm_in(compute_type(a), out, a, b, beta, alpha);
}

void gemm_rounded(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha) {
  const bool narrow = a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16;
  if (!narrow || !multiplies_bf16() || a.size(0) >= kFewLines) return gemm_cpu(out, a, b, beta, alpha);
  Tensor c = out;
  if (out.scalar_type() == at::kBFloat16) {
    at::addmm_out(c, out, a, b, beta, alpha);
    return;
  }
  const Tensor product = at::mm(a, b);
  beta == 0 ? c.copy_(product).mul_(alpha) : c.mul_(beta).add_(product, alpha);
}

}  // namespace shoestring::gemm
