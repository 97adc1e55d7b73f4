// Sums of matrix products on the CPU. The depth of a product is its inner dimension, over which it sums. The
// longer side of the result is divided into blocks. Each thread packs the operand panels of its own blocks,
// which fit the L2 cache. The panels of the shorter side are packed once and shared by all threads, for as
// large a range of the depth as fits into kSharedBytes. The larger operand is thus read from memory only
// once, and the threads synchronise only after each such range. The terms of a sum are further ranges of the
// depth, so the result is written once, however many terms there are.

#include "gemm/packed_gemm.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "core/huge_pages.h"
#include "core/tensors.h"
#include "core/threads.h"
#include "gemm/gemm.h"
#include "gemm/gemm_table.h"

namespace shoestring::gemm {
namespace {

using at::Tensor;

constexpr int64_t kBlockBytes = int64_t{256} << 10;  // limit in bytes for the packed panels of each thread
// Limit in bytes for the part of the result that a block covers. The products over successive ranges of the
// depth are added to this part.
constexpr int64_t kResultBytes = int64_t{768} << 10;
// Limit in bytes for the packed panels that all threads share. The room for the padding of panels lets 512
// lines of 8,192 bf16 numbers fit.
constexpr int64_t kSharedBytes = (int64_t{8} << 20) + (int64_t{64} << 10);
// Limits in bytes if the sums of a task are kept as tiles: for its packed panels over all pieces of a round,
// and for its sums. Both stay in the L2 cache. Memory beyond it delivers panels of the shared side more
// slowly than AMX multiplies them, so each of them is multiplied by as many own panels as fit.
constexpr int64_t kOwnBytes = int64_t{768} << 10, kSumBytes = int64_t{256} << 10;
// Limit in bytes for the elements that a thread computes or gathers before it packs them.
constexpr int64_t kComputedBytes = int64_t{64} << 10;

// number of own panels by which a panel of the shared side is multiplied at least, if the product divides
// that side into groups
constexpr int64_t kLeastPanels = 8;

// With more lines on the shared side, the larger operand is used so often that reading it takes little of the
// time.
constexpr int64_t kLinesToAskAhead = 256;

constexpr int64_t kFloatBytes = sizeof(float);

bool is_packed_directly(const Tensor& m) {
  const auto single = [&](int dim) { return m.size(dim) == 1 || m.stride(dim) == 1; };
  return single(0) || single(1);
}

// One operand of a matrix product, divided into panels of `width` lines. A line is a row of a or a column of
// b.
struct Side {
  Side(const kernels::GemmProduct& product, const kernels::GemmPack& functions, const Factor& factor,
       int line_dim, int64_t width)
      : lines(factor.size(line_dim)), width(width), panels(parts_of(lines, width)), computed(factor.computed),
        product(product), functions(functions), index(factor.index), gathered(factor.gathered),
        matrix(gathered || computed != nullptr ? factor.matrix : readable(factor.matrix)),
        lines_are_rows((line_dim == 0) != factor.transposed) {
    if (gathered || computed != nullptr) return;
    line_stride = lines == 1 ? 1 : matrix.stride(line_dim);
    depth_stride = matrix.size(1 - line_dim) == 1 ? 1 : matrix.stride(1 - line_dim);
  }

  // Returns the size of a packed panel in fp32 elements.
  int64_t packed(int64_t depth) const {
    return kernels::packed_size(parts_of(depth, product.depth_multiple) * product.depth_multiple,
                                product.steps, width);
  }

  // Returns the number of panels that are computed or gathered before they are packed.
  int64_t together(int64_t depth) const {
    return std::max<int64_t>(1, kComputedBytes * product.steps / kFloatBytes / (width * depth));
  }

  // Returns the size in fp32 elements of the room that pack() needs.
  int64_t room(int64_t depth) const {
    const int64_t count = together(depth) * width * depth;
    if (gathered) return parts_of(count * matrix.element_size(), kFloatBytes);
    return computed == nullptr ? 0 : parts_of(count, product.steps);
  }

  // Packs the panels [first, last), restricted to the depths [begin, begin + depth), into `out`.
  void pack(int64_t first, int64_t last, int64_t begin, int64_t depth, float* out, float* room) const {
    const int64_t line = first * width, count = std::min(last * width, lines) - line;
    if (gathered) return gather(line, count, begin, depth, out, room);
    if (computed == nullptr) {
      const int64_t offset = line * line_stride + begin * depth_stride;
      return pack_lines(matrix.scalar_type(), matrix.const_data_ptr(), offset, count, depth, line_stride,
                        depth_stride, out);
    }
    for (int64_t i = 0, step = together(depth) * width; i < count; i += step) {
      const int64_t some = std::min(step, count - i);
      const auto read = [&](auto* to) {
        lines_are_rows ? computed->read(line + i, some, begin, depth, to)
                       : computed->read(begin, depth, line + i, some, to);
      };
      // A computed matrix is given in the dtype of the product.
      product.steps == 1 ? read(room) : read(reinterpret_cast<uint16_t*>(room));
      pack_lines(product.steps == 1 ? at::kFloat : at::kBFloat16, room, 0, some, depth,
                 lines_are_rows ? depth : 1, lines_are_rows ? 1 : some, out + i / width * packed(depth));
    }
  }

  // Returns the memory of the panels [first, last), restricted to the depths [begin, begin + depth).
  kernels::GemmAhead memory(int64_t first, int64_t last, int64_t begin, int64_t depth) const {
    if (gathered || computed != nullptr || first >= last) return {};
    const int64_t line = first * width, count = std::min(last * width, lines) - line,
                  size = matrix.element_size();
    const auto* data = static_cast<const char*>(matrix.const_data_ptr()) +
                       (line * line_stride + begin * depth_stride) * size;
    return depth_stride == 1 ? kernels::GemmAhead{data, count, depth * size, line_stride * size}
                             : kernels::GemmAhead{data, depth, count * size, depth_stride * size};
  }

  int64_t lines, width, panels;
  const ComputedMatrix* computed;

 private:
  // Copies the gathered lines [line, line + count) to `room`, some panels at a time, and packs them there.
  void gather(int64_t line, int64_t count, int64_t begin, int64_t depth, float* out, float* room) const {
    const int64_t bytes = matrix.element_size(), stride = matrix.stride(0) * bytes;
    const auto* from = static_cast<const char*>(matrix.const_data_ptr());
    auto* to = reinterpret_cast<char*>(room);
    for (int64_t i = 0, step = together(depth) * width; i < count; i += step) {
      const int64_t some = std::min(step, count - i);
      const int64_t row = lines_are_rows ? line + i : begin, rows = lines_are_rows ? some : depth;
      const int64_t column = lines_are_rows ? begin : line + i,
                    size = (lines_are_rows ? depth : some) * bytes;
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(to + r * size, from + index[row + r] * stride + column * bytes, size);
      pack_lines(matrix.scalar_type(), room, 0, some, depth, lines_are_rows ? depth : 1,
                 lines_are_rows ? 1 : some, out + i / width * packed(depth));
    }
  }

  void pack_lines(at::ScalarType type, const void* data, int64_t offset, int64_t count, int64_t depth,
                  int64_t by_line, int64_t by_depth, float* out) const {
    if (type == at::kFloat) {
      functions.from_float(static_cast<const float*>(data) + offset, count, depth, by_line, by_depth, width,
                           out);
    } else {
      (type == at::kHalf ? functions.from_fp16 : functions.from_bf16)(
          static_cast<const uint16_t*>(data) + offset, count, depth, by_line, by_depth, width, out);
    }
  }

  static Tensor readable(const Tensor& m) { return is_packed_directly(m) ? m : m.contiguous(); }

  const kernels::GemmProduct& product;
  const kernels::GemmPack functions;
  const c10::ArrayRef<int64_t> index;
  bool gathered;
  Tensor matrix;
  bool lines_are_rows;  // whether the lines of a computed or gathered matrix are its rows
  int64_t line_stride = 1, depth_stride = 1;
};

// Memory for packed panels, which is kept and reused by later products. In a small product, page faults in
// new memory take longer than packing. Freeing and reallocating this memory would fragment the heap. The
// process keeps at most kKept bytes, however many threads multiply.
class Scratch {
 public:
  explicit Scratch(int64_t count) : buffer_(take(count)) {}
  ~Scratch() {
    const std::lock_guard lock(spare().mutex);
    auto& buffers = spare().buffers;
    size_t bytes = buffer_.nbytes();
    for (const Tensor& t : buffers) bytes += t.nbytes();
    if (bytes <= kKept) buffers.push_back(std::move(buffer_));
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* data() const { return buffer_.mutable_data_ptr<float>(); }

 private:
  static constexpr size_t kKept = size_t{2} * kSharedBytes;
  struct SpareBuffers {
    std::mutex mutex;
    std::vector<Tensor> buffers;
  };
  static SpareBuffers& spare() {
    static auto& all =
        *new SpareBuffers;  // never destroyed, because a thread may multiply while the process ends
    return all;
  }
  static Tensor take(int64_t count) {
    {
      const std::lock_guard lock(spare().mutex);
      auto& buffers = spare().buffers;
      const auto fits = [&](const Tensor& t) { return t.numel() >= count; };
      const auto large_enough = std::find_if(buffers.begin(), buffers.end(), fits);
      if (large_enough != buffers.end()) {
        const Tensor buffer = std::move(*large_enough);
        buffers.erase(large_enough);
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
  Result(const Tensor& out, const Tensor& gain, const Tensor& offset)
      : wide(out.scalar_type() == at::kFloat ? out.mutable_data_ptr<float>() : nullptr),
        narrow{wide == nullptr ? bits(out) : nullptr, out.stride(0), out.scalar_type() == at::kHalf,
               gain.defined() ? gain.const_data_ptr<float>() : nullptr,
               offset.defined() ? offset.const_data_ptr<float>() : nullptr} {}

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

  // Does the same as read(), but stores the elements as tiles.
  void read_tiles(const kernels::GemmProduct& product, int64_t line, int64_t column, int64_t lines,
                  int64_t columns, float* to) const {
    const int64_t height = product.width_a, width = product.width_b;
    for (int64_t i = 0; i < lines; i += height) {
      for (int64_t j = 0; j < columns; j += width, to += height * width) {
        read(line + i, column + j, std::min(height, lines - i), std::min(width, columns - j), to, width);
      }
    }
  }

  // Returns `narrow` for the part of the result that starts at (row, column).
  kernels::GemmNarrow part(int64_t row, int64_t column) const {
    kernels::GemmNarrow from = narrow;
    if (from.data == nullptr) return from;
    from.data += row * from.stride + column;
    if (from.gain != nullptr) from.gain += column;
    if (from.offset != nullptr) from.offset += column;
    return from;
  }

  float* wide;
  kernels::GemmNarrow narrow;
};

// The panels of both operands of one term.
struct Sides {
  Sides(const kernels::GemmProduct& product, const Term& term)
      : a(product, product.rows, term.a, 0, product.width_a), b(right(product, term.b)),
        depth(term.a.size(1)) {}

  static Side right(const kernels::GemmProduct& product, const Factor& b) {
    return {product, {product.pack_float, product.pack_bf16, product.pack_fp16}, b, 1, product.width_b};
  }

  bool shares_a() const { return a.lines <= b.lines; }
  const Side& shared() const { return shares_a() ? a : b; }
  const Side& own() const { return shares_a() ? b : a; }

  Side a, b;
  int64_t depth;
};

// A range of the depth of one term. The sums of a tile restart with each piece.
struct Piece {
  const Sides* sides;
  int64_t begin, depth;
  int64_t shared_at, own_at;  // offsets of the packed panels of the round, in fp32 elements
};

// The pieces that are packed before the threads synchronise.
struct Round {
  std::vector<Piece> pieces;
  int64_t shared_size = 0, own_panel_size = 0;  // own_panel_size: of one own panel over all pieces
};

// With fewer pieces than this, equal sizes give smaller rounding errors.
constexpr int64_t kManyPieces = 8;

// Divides the depth of all terms into pieces, and the pieces into rounds. Of many pieces, all pieces of a
// term but the last have the same size whatever the depth is, so a product whose depth arrives in parts that
// are multiples of this size has the bits of the whole product.
std::vector<Round> rounds_of(const kernels::GemmProduct& product, const std::vector<Sides>& terms) {
  std::vector<Round> rounds(1);
  for (const Sides& sides : terms) {
    if (sides.depth == 0) continue;
    const int64_t parts = parts_of(sides.depth, product.most_depth),
                  even =
                      parts_of(parts_of(sides.depth, parts), product.depth_multiple) * product.depth_multiple;
    const int64_t step = parts < kManyPieces ? even : product.most_depth;
    for (int64_t begin = 0; begin < sides.depth; begin += step) {
      const int64_t depth = std::min(step, sides.depth - begin);
      const int64_t size = sides.shared().panels * sides.shared().packed(depth);
      if (!rounds.back().pieces.empty() && (rounds.back().shared_size + size) * kFloatBytes > kSharedBytes) {
        rounds.emplace_back();
      }
      Round& round = rounds.back();
      round.pieces.push_back({&sides, begin, depth, round.shared_size, round.own_panel_size});
      round.shared_size += size;
      round.own_panel_size += sides.own().packed(depth);
    }
  }
  return rounds;
}

void multiply(const kernels::GemmProduct& product, const Result& out, const std::vector<Sides>& terms,
              const std::vector<Round>& rounds, float alpha, float beta, const Factor* following) {
  const bool share_a = terms[0].shares_a();
  const Side &shared = terms[0].shared(), &own = terms[0].own();
  double multiplications = 0;
  for (const Sides& sides : terms) {
    multiplications += static_cast<double>(sides.a.lines * sides.b.lines) * static_cast<double>(sides.depth);
  }
  const int64_t threads = threads_for(multiplications);
  const Piece* last_piece = &rounds.back().pieces.back();
  int64_t shared_size = 0, own_panel = 0, own_panels = 0, computed = 0;
  size_t count = 0;
  for (const Round& round : rounds) {
    shared_size = std::max(shared_size, round.shared_size);
    own_panels = std::max(own_panels, round.own_panel_size);
    count += round.pieces.size();
    for (const Piece& piece : round.pieces) {
      own_panel = std::max(own_panel, piece.sides->own().packed(piece.depth));
      computed = std::max({computed, piece.sides->a.room(piece.depth), piece.sides->b.room(piece.depth)});
    }
  }

  // Blocks have equal size, and each thread gets equally many. If there are fewer blocks than threads,
  // several threads share a block and divide the shorter side of the result among them.
  const int64_t fit_packed = kBlockBytes / kFloatBytes / own_panel;
  const int64_t fit_result = kResultBytes / kFloatBytes / (own.width * shared.lines);
  const int64_t least = product.in_groups ? kLeastPanels : 1;
  const bool sums = count > 1 || (out.wide == nullptr && beta != 0);
  // Sums that are not kept in the result are kept as tiles: their rows would compete for few cache sets.
  const bool tiles = product.in_groups && sums && out.wide == nullptr;
  const int64_t block_fit = tiles ? std::max(kOwnBytes / kFloatBytes / own_panels, least)
                                  : std::max<int64_t>(1, std::min(fit_packed, std::max(fit_result, least)));
  const int64_t block = parts_of(own.panels, parts_of(parts_of(own.panels, block_fit), threads) * threads);
  const int64_t blocks = parts_of(own.panels, block), parts = parts_of(threads, blocks);
  const int64_t part = parts_of(shared.panels, parts);
  // A task computes the result for a group of shared panels over all pieces of the round before the next
  // group, so that this part of the result stays in the L2 cache. The task keeps its own panels of all
  // pieces.
  const int64_t group_fit =
      (tiles ? kSumBytes : kResultBytes) / kFloatBytes / (block * own.width * shared.width);
  const int64_t group = product.in_groups && sums ? std::clamp<int64_t>(group_fit, 1, part) : part;

  const int64_t own_size = block * (group < part ? own_panels : own_panel);
  // a task's sums, if they are not kept in the result
  const int64_t sum_stride = tiles ? 0 : (share_a ? block * own.width : group * shared.width);
  const int64_t sum_size = out.wide == nullptr && sums ? block * own.width * group * shared.width : 0;
  const int64_t size = own_size + sum_size + computed;
  // The memory that a block of the following product packs first, if that product is like this one.
  kernels::GemmAhead after;
  if (following != nullptr && share_a && following->matrix.defined() &&
      is_packed_directly(following->matrix)) {
    const Side side = Sides::right(product, *following);
    after = side.memory(0, std::min(block, side.panels), 0,
                        std::min(rounds[0].pieces[0].depth, following->size(0)));
  }
  const Scratch for_all(shared_size), for_one(threads * size);
  float* all = for_all.data();
  const auto scratch = [&] { return for_one.data() + at::get_thread_num() * size; };

  for (const Round& round : rounds) {
    at::parallel_for(0, shared.panels, parts_of(shared.panels, threads), [&](int64_t first, int64_t last) {
      for (const Piece& piece : round.pieces) {
        const Side& side = piece.sides->shared();
        side.pack(first, last, piece.begin, piece.depth,
                  all + piece.shared_at + first * side.packed(piece.depth), scratch() + own_size + sum_size);
      }
    });
    // Computes the lines of the own panels [first, last) and of the shared panels [from, to). The thread's
    // next block begins with the own panel `then`.
    const auto compute = [&](int64_t first, int64_t last, int64_t from, int64_t to, bool pack, int64_t then,
                             float* memory) {
      const int64_t own_line = first * own.width,
                    own_lines = std::min(last * own.width, own.lines) - own_line;
      const int64_t line = from * shared.width, lines = std::min(to * shared.width, shared.lines) - line;
      const int64_t row = share_a ? line : own_line, column = share_a ? own_line : line;
      const int64_t rows = share_a ? lines : own_lines, columns = share_a ? own_lines : lines;
      const bool wide = out.wide != nullptr;
      const int64_t stride = wide ? out.narrow.stride : sum_stride;
      float* c = wide ? out.wide + row * stride + column : memory + own_size;
      if (!wide && beta != 0) {
        tiles ? out.read_tiles(product, row, column, rows, columns, c)
              : out.read(row, column, rows, columns, c, stride);
      }
      const kernels::GemmNarrow rounded = out.part(row, column);
      for (const Piece& piece : round.pieces) {
        const Side& side = piece.sides->own();
        float* packed = memory + (group < part ? block * piece.own_at : 0);
        if (pack) side.pack(first, last, piece.begin, piece.depth, packed, memory + own_size + sum_size);
        const float* shared_panels = all + piece.shared_at + from * piece.sides->shared().packed(piece.depth);
        const bool begins = &piece == &rounds[0].pieces[0], ends = !wide && &piece == last_piece;
        const bool more = &piece != &round.pieces.back();
        const Piece& next = more ? *(&piece + 1) : round.pieces.front();
        kernels::GemmAhead ahead;
        if (shared.lines <= kLinesToAskAhead) {
          const int64_t from_panel = more ? first : then, to_panel = std::min(from_panel + block, own.panels);
          ahead = from_panel < to_panel
                      ? next.sides->own().memory(from_panel, to_panel, next.begin, next.depth)
                      : after;
        }
        product.multiply(share_a ? shared_panels : packed, share_a ? packed : shared_panels, rows, columns,
                         piece.depth, c, stride, alpha, begins ? beta : 1, ends ? &rounded : nullptr,
                         !share_a, ahead);
      }
    };
    const int64_t tasks = blocks * parts;
    at::parallel_for(0, tasks, parts_of(tasks, threads), [&](int64_t first_task, int64_t last_task) {
      for (int64_t task = first_task; task < last_task; ++task) {
        const int64_t first = task / parts * block, last = std::min(first + block, own.panels);
        const int64_t start = std::min(task % parts * part, shared.panels),
                      stop = std::min(start + part, shared.panels);
        const int64_t then = task + 1 < last_task ? (task + 1) / parts * block : own.panels;
        for (int64_t from = start; from < stop; from += group) {
          compute(first, last, from, std::min(from + group, stop), from == start || group == part, then,
                  scratch());
        }
      }
    });
  }
}

}  // namespace

int64_t gemm_workspace(at::ScalarType type) {
  // A thread that divides the shared panels into groups keeps its own panels of a whole round. It has at most
  // a third as many panels as the shared side.
  const bool groups = type == at::kBFloat16 && cpu::gemm_amx().in_groups;
  const int64_t own_bytes = groups ? kSharedBytes / 3 : kBlockBytes;
  return kSharedBytes + at::get_num_threads() * (own_bytes + kResultBytes + kComputedBytes);
}

void multiply_packed(const kernels::GemmProduct& product, const Tensor& out, c10::ArrayRef<Term> terms,
                     double beta, double alpha, const Tensor& gain, const Tensor& offset,
                     const Factor* then) {
  std::vector<Sides> sides;
  sides.reserve(terms.size());
  for (const Term& term : terms) sides.emplace_back(product, term);
  const std::vector<Round> rounds = rounds_of(product, sides);
  // A 16-bit result is written directly if the sum is complete in one round, while it is in the cache.
  const bool narrow = out.scalar_type() != at::kFloat;
  const bool direct = (out.stride(1) == 1 || out.size(1) == 1) && (!narrow || rounds.size() == 1);
  Tensor c = direct      ? out
             : beta == 0 ? at::empty(out.sizes(), out.options().dtype(at::kFloat))
                         : out.to(at::kFloat).contiguous();
  multiply(product, Result(c, gain, offset), sides, rounds, static_cast<float>(alpha),
           static_cast<float>(beta), then);
  if (!direct || !narrow) {
    if (gain.defined()) c.mul_(gain);
    if (offset.defined()) c.add_(offset);
  }
  if (!direct) out.copy_(c);
}

}  // namespace shoestring::gemm
