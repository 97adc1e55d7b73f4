// Emulates barriers in shared memory (mbarriers) and the tensor copies that complete on them. A copy reads
// its data when it begins. It delivers the data only when no thread can continue without it. A thread that
// does not wait therefore finds bytes that are still in flight.

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "internal.h"
#include "simt_hopper.h"

namespace simt {
namespace {

constexpr uint64_t kMagic = 0x7e4507a9;
constexpr int kMostBytes = (1 << 20) - 1;  // largest number of bytes that an mbarrier can count in one phase

struct Mbarrier {
  uintptr_t address;
  // A number that identifies the tensor copies of this mbarrier in access records and vector clocks, as a
  // thread id identifies a thread.
  int agent;
  int arrivals, pending;
  // For the current phase: the bytes that are announced and not delivered yet, and the bytes of copies in
  // flight.
  int64_t expected = 0, issued = 0;
  uint32_t phase = 0;  // number of completed phases
  bool fenced = false;
  int owner;
  // Merged vector clocks of the threads that arrived: in the current phase (published), and up to the last
  // completed one.
  std::vector<uint32_t> published, completed;
  std::vector<int> waiting;  // ids of the threads that wait for the current phase to complete
  // The arrivals of the current phase, and of the last completed one: thread, and its clock before.
  using Arrivals = std::vector<std::pair<int, uint32_t>>;
  Arrivals arrived, arrived_before;
};
std::deque<Mbarrier> barriers;

struct Copy {
  Mbarrier* barrier;
  struct Piece {
    unsigned char* to;
    std::vector<unsigned char> bytes;
  };
  std::vector<Piece> pieces;
  int64_t bytes;
};
std::deque<Copy> copies;

Mbarrier& barrier_at(void* p, const char* name, Where where) {
  for (Mbarrier& b : barriers) {
    if (b.address != reinterpret_cast<uintptr_t>(p)) continue;
    // fails unless this thread is ordered after the initialisation of the mbarrier
    check(p, 8, false, false, {nullptr, where});
    return b;
  }
  fail(std::string(name) + " (" + text_of(where) + "): there is no initialised mbarrier at this address");
}

void finish_phase(Mbarrier& b) {
  if (b.pending > 0 || b.expected > 0) return;
  ++b.phase;
  b.pending = b.arrivals;
  b.issued = 0;
  b.published.resize(std::max<size_t>(b.published.size(), b.agent + 1));
  b.published[b.agent] = b.phase;
  b.completed = b.published;
  b.arrived_before = std::exchange(b.arrived, {});
  for (int t : b.waiting) threads[t].waiting = false;
  b.waiting.clear();
}

// A lane that waits for an arrival of another lane of its warp keeps the warp apart, and the other lane may
// be the slower for it. A __syncwarp between the arrival and the wait is missing.
[[noreturn]] void waits_for_own_warp(int waiting, int arriving, const char* name, Where where) {
  fail(std::string(name) + " (" + text_of(where) + "): lane " + std::to_string(waiting % 32) +
       " waits for the arrival of lane " + std::to_string(arriving % 32) +
       " of its own warp; expected a __syncwarp() after the arrival and before the wait");
}

void arrive(Mbarrier& b, const char* name, Where where) {
  if (b.pending == 0) {
    fail(std::string(name) + " (" + text_of(where) + "): more arrivals than the barrier's " +
         std::to_string(b.arrivals));
  }
  for (int t : b.waiting) {
    if (t / 32 == current->id / 32) waits_for_own_warp(t, current->id, name, where);
  }
  b.arrived.emplace_back(current->id, current->clock);
  learn_from(b.published, *current);
  b.published[current->id] = current->clock++;
  --b.pending;
  finish_phase(b);
}

int index_of(const Mbarrier& b) { return b.agent - block.threads; }

}  // namespace

void begin_mbarriers() {
  barriers.clear();
  copies.clear();
}

void mbarrier_init(void* p, int arrivals, Where where) {
  const Place place{nullptr, where};
  check_aligned(p, 8, true, place);
  if (!is_shared(p, 8)) bad_access("an mbarrier is in shared memory", 8, true, false, place, "");
  if (arrivals < 1)
    fail("mbarrier_init: expected a count of at least 1, received " + std::to_string(arrivals));
  for (const Mbarrier& b : barriers) {
    if (b.address == reinterpret_cast<uintptr_t>(p)) {
      fail("mbarrier_init (" + text_of(where) + "): the barrier is initialised already");
    }
  }
  const int agent = block.threads + static_cast<int>(barriers.size());
  if (agent >= kMaxThreads)
    fail("mbarrier_init: the emulator has stamps for 1024 threads and barriers together");
  Mbarrier b{reinterpret_cast<uintptr_t>(p), agent, arrivals, arrivals};
  b.owner = current->id;
  barriers.push_back(std::move(b));
}

void mbarrier_init_fence(Where) {
  for (Mbarrier& b : barriers) b.fenced = b.fenced || b.owner == current->id;
  current->fenced = current->clock++;
}

void mbarrier_arrive(void* p, Where where) {
  arrive(barrier_at(p, "mbarrier_arrive", where), "mbarrier_arrive", where);
}

void mbarrier_arrive_expect(void* p, int bytes, Where where) {
  Mbarrier& b = barrier_at(p, "mbarrier_arrive_expect", where);
  if (bytes < 0 || b.expected + bytes > kMostBytes) {
    fail("mbarrier_arrive_expect (" + text_of(where) + "): expected at most 2^20 - 1 bytes, received " +
         std::to_string(bytes));
  }
  b.expected += bytes;
  arrive(b, "mbarrier_arrive_expect", where);
}

void mbarrier_wait(void* p, int parity, Where where) {
  if (parity != 0 && parity != 1)
    fail("mbarrier_wait: expected a parity of 0 or 1, received " + std::to_string(parity));
  Mbarrier& b = barrier_at(p, "mbarrier_wait", where);
  const bool over = static_cast<int>(b.phase & 1) != parity;
  for (const auto& [thread, clock] : over ? b.arrived_before : b.arrived) {
    if (thread / 32 == current->id / 32 && !current->knows(thread, clock))
      waits_for_own_warp(current->id, thread, "mbarrier_wait", where);
  }
  if (!over) {
    const uint32_t before = b.phase;
    b.waiting.push_back(current->id);
    wait_at("mbarrier_wait", where);
    if (b.phase != before + 1) {
      fail("mbarrier_wait (" + text_of(where) +
           "): the barrier went on for a second phase before this thread saw the first");
    }
  }
  auto known = std::make_shared<std::vector<uint32_t>>(*current->known);
  learn(*known, b.completed);
  current->known = std::move(known);
}

void async_fence(Where) { current->fenced = current->clock++; }

const char* encode_tensor_map(TensorMap* map, const void* address, int rank, int element,
                              const int64_t* sizes, const int64_t* strides, const int* box) {
  if (rank < 3 || rank > 5) return "a tensor map has three to five dimensions";
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) return "a tensor map's address is a multiple of 16";
  if (box[0] * element > 128) return "a row of the box has at most 128 bytes, which are swizzled";
  if (box[0] * element % 16 != 0) return "a row of the box is a multiple of 16 bytes";
  *map = {kMagic, static_cast<const unsigned char*>(address), rank, element, {}, {}, {}};
  int64_t inside = sizes[0] * element;  // bytes over which the dimensions so far extend
  for (int i = 0; i < rank; ++i) {
    if (sizes[i] < 1 || sizes[i] > int64_t{1} << 32)
      return "a tensor map's dimensions have 1 to 2^32 elements";
    if (box[i] < 1 || box[i] > 256) return "a tensor map's box has 1 to 256 elements in a dimension";
    if (i > 0 && (strides[i - 1] <= 0 || strides[i - 1] % 16 != 0 || strides[i - 1] >= int64_t{1} << 40)) {
      return "a tensor map's strides are multiples of 16, above 0 and below 2^40";
    }
    // The documentation requires this of all dimensions, but transposed tensors are known to work.
    if (i > 0 && sizes[i] == 1 && strides[i - 1] < inside)
      return "the stride of a tensor map's dimension of size 1 steps over the dimensions inside of it";
    if (i > 0) inside = std::max(inside, strides[i - 1] * sizes[i]);
    map->sizes[i] = sizes[i];
    map->strides[i] = i > 0 ? strides[i - 1] : element;
    map->box[i] = box[i];
  }
  return nullptr;
}

void tensor_copy(void* to, const TensorMap& map, void* p, const int* at, int rank, Where where) {
  const Place place{nullptr, where};
  const std::string here = " (" + text_of(where) + ")";
  if (map.magic != kMagic) fail("tma_load" + here + ": the tensor map was not encoded");
  if (map.rank != rank) {
    fail("tma_load" + here + ": expected " + std::to_string(map.rank) + " coordinates, received " +
         std::to_string(rank));
  }
  if (reinterpret_cast<uintptr_t>(to) % 1024 != 0) {
    bad_access("misaligned: the swizzle repeats every 1024 bytes", 16, true, false, place, "");
  }
  Mbarrier& b = barrier_at(p, "tma_load", where);
  if (!b.fenced) fail("tma_load" + here + ": no mbarrier_init_fence() after the barrier's initialisation");
  Copy copy{&b, {}, 0};
  const int row_bytes = map.box[0] * map.element;
  int64_t rows = 1;
  for (int i = 1; i < rank; ++i) rows *= map.box[i];
  copy.bytes = rows * row_bytes;
  if (b.pending == b.arrivals && b.expected == 0) {
    fail("tma_load" + here + ": the barrier's phase expects no bytes yet; call mbarrier_arrive_expect first");
  }
  b.issued += copy.bytes;
  if (b.issued > b.expected) {
    fail("tma_load" + here + ": copies of " + std::to_string(b.issued) +
         " bytes, and the barrier's phase expects " + std::to_string(b.expected));
  }
  auto* begin = static_cast<unsigned char*>(to);
  if (!is_shared(to, copy.bytes))
    bad_access("a tensor copy writes to shared memory only", copy.bytes, true, false, place, "");
  // Number of elements from the box's first column to the end of a row of the tensor.
  const int64_t last = map.sizes[0] - at[0];
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<unsigned char> bytes(row_bytes, 0);
    const unsigned char* from = map.address + at[0] * int64_t{map.element};
    bool inside = at[0] >= 0 && last > 0;
    if (at[0] < 0) fail("tma_load" + here + ": the emulator knows no first coordinate below 0");
    int64_t rest = row;
    for (int i = 1; i < rank; ++i) {
      const int64_t x = at[i] + rest % map.box[i];
      rest /= map.box[i];
      inside = inside && x >= 0 && x < map.sizes[i];
      from += x * map.strides[i];
    }
    if (inside) {
      const size_t size = std::min<int64_t>(map.box[0], last) * map.element;
      check(from, size, false, false, place);
      std::memcpy(bytes.data(), from, size);
    }
    for (int byte = 0; byte < row_bytes; byte += 16) {
      auto address = reinterpret_cast<uintptr_t>(begin + row * row_bytes + byte);
      address ^= (address >> 7 & 7) << 4;
      copy.pieces.push_back(
          {reinterpret_cast<unsigned char*>(address), {bytes.begin() + byte, bytes.begin() + byte + 16}});
    }
  }
  begin_write(to, copy.bytes, b.agent, place);
  copies.push_back(std::move(copy));
}

bool deliver() {
  while (!copies.empty()) {
    Copy copy = std::move(copies.front());
    copies.pop_front();
    Mbarrier& b = *copy.barrier;
    for (const auto& piece : copy.pieces) {
      std::memcpy(piece.to, piece.bytes.data(), piece.bytes.size());
      end_write(piece.to, piece.bytes.size(), b.agent, b.phase + 1);
    }
    b.expected -= copy.bytes;
    b.issued -= copy.bytes;
    const bool someone = !b.waiting.empty();
    const uint32_t before = b.phase;
    finish_phase(b);
    if (someone && b.phase != before) return true;
  }
  return false;
}

const char* left_in_block() {
  return copies.empty() ? nullptr : "the block ends while its tensor copies are under way";
}

std::string state_of_mbarriers() {
  std::string text;
  for (const Mbarrier& b : barriers) {
    if (b.waiting.empty()) continue;
    text += "; mbarrier " + std::to_string(index_of(b)) + " in phase " + std::to_string(b.phase) + " lacks " +
            std::to_string(b.pending) + " of " + std::to_string(b.arrivals) + " arrivals and " +
            std::to_string(b.expected) + " bytes";
  }
  return text;
}

}  // namespace simt
