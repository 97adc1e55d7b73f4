// Checks every memory access of a kernel before it happens. The memory must be accessible to the kernel,
// initialised, and aligned. The access must be ordered after conflicting accesses of other threads. The
// compiler inserts the calls (-fsanitize=thread); this file takes the place of ThreadSanitizer's run-time
// library.

#include <link.h>
#include <pthread.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "internal.h"

namespace simt {
namespace {

// A record of the last access to a byte: block (30 bits), thread (10 bits), clock (23 bits), and whether the
// access was atomic (1 bit).
using Stamp = uint64_t;
// The clock in the record of a byte that a copy has not delivered yet, or that a wgmma still reads.
constexpr uint32_t kInFlight = (1u << 23) - 1;

Stamp stamp(int thread, uint32_t clock, bool atomic) {
  return Stamp{block.serial} << 34 | Stamp(thread) << 24 | Stamp{clock} << 1 | Stamp{atomic};
}
Stamp stamp(uint32_t clock, bool atomic) { return stamp(current->id, clock, atomic); }
uint32_t serial_of(Stamp s) { return static_cast<uint32_t>(s >> 34); }
int thread_of(Stamp s) { return s >> 24 & 1023; }
uint32_t clock_of(Stamp s) { return s >> 1 & kInFlight; }
bool atomic_of(Stamp s) { return s & 1; }

struct Cell {
  Stamp write;
  // Three reads of the byte: the last read of any thread, the last read by another lane of that thread's
  // warp, and the last read by another warp.
  Stamp reads[3];
};

struct Memory {
  size_t size;
  // access records, one for each byte of the memory; allocated at the first access
  std::unique_ptr<Cell[], void (*)(void*)> cells{nullptr, std::free};
};

// The registered memory, by the address of its first byte. The map is never destroyed, since tensors may live
// until the process ends. The lock is needed because other threads of the process may allocate while a kernel
// runs.
auto& memories = *new std::map<uintptr_t, Memory>;
auto& memories_lock = *new std::mutex;
// Holds the lock while the process forks. Otherwise the child could inherit a lock that a thread of the
// parent holds, and wait for it forever.
[[maybe_unused]] const int held_at_fork = pthread_atfork(
    [] { memories_lock.lock(); }, [] { memories_lock.unlock(); }, [] { memories_lock.unlock(); });
uintptr_t last_begin = 1, last_end = 0;
Cell* last_cells = nullptr;

Cell* zero_cells(size_t n) { return static_cast<Cell*>(std::calloc(n, sizeof(Cell))); }

Cell* cells_of(Memory& m) {
  if (!m.cells) m.cells.reset(zero_cells(m.size));
  return m.cells.get();
}

// The memory of the library that contains the kernels. __shared__ variables are its thread-local storage, and
// constants are in its read-only data. Writing the variable `touch` makes the loader allocate the library's
// thread-local storage.
thread_local volatile char touch;

struct Module {
  uintptr_t begin = 0, end = 0, shared = 0;
  size_t shared_size = 0;
  Cell* cells = nullptr;
};

Module find_module() {
  touch = 1;
  Module module;
  const auto visit = [](dl_phdr_info* info, size_t, void* data) {
    auto& m = *static_cast<Module*>(data);
    const auto inside = reinterpret_cast<uintptr_t>(&find_module);
    uintptr_t begin = UINTPTR_MAX, end = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& header = info->dlpi_phdr[i];
      if (header.p_type != PT_LOAD) continue;
      begin = std::min<uintptr_t>(begin, info->dlpi_addr + header.p_vaddr);
      end = std::max<uintptr_t>(end, info->dlpi_addr + header.p_vaddr + header.p_memsz);
    }
    if (inside < begin || inside >= end) return 0;
    m.begin = begin;
    m.end = end;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      if (info->dlpi_phdr[i].p_type == PT_TLS) m.shared_size = info->dlpi_phdr[i].p_memsz;
    }
    m.shared = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
    return 1;
  };
  dl_iterate_phdr(visit, &module);
  module.cells = zero_cells(module.shared_size);
  return module;
}

Module module;
std::vector<Cell> dynamic_cells;

const char* kind(bool write, bool atomic) {
  return atomic ? "atomic operation on" : write ? "write to" : "read of";
}

[[noreturn]] void race(Stamp other, bool other_wrote, bool shared, size_t size, bool write, bool atomic,
                       const Place& place) {
  const bool copied = serial_of(other) == block.serial && thread_of(other) >= block.threads;
  std::string who = copied ? "a tensor copy" : "thread " + std::to_string(thread_of(other));
  if (serial_of(other) != block.serial) who += " of another block";
  bad_access(shared ? "race in shared memory" : "race in global memory", size, write, atomic, place,
             ", not ordered after " + who + (other_wrote ? "'s write" : "'s read"));
}

// Returns whether the access with record `s` is from the current launch and not known to the current thread
// as finished. Accesses of other blocks to shared memory do not count, since each block has its own.
bool unordered(Stamp s, bool shared) {
  const uint32_t serial = serial_of(s);
  if (serial == block.serial) return !current->knows(thread_of(s), clock_of(s));
  return !shared && serial >= block.launch_first;
}

void check_cell(Cell& cell, bool shared, size_t size, bool write, bool atomic, const Place& place) {
  const bool fresh = serial_of(cell.write) == block.serial;
  if (fresh && clock_of(cell.write) == kInFlight) {
    if (thread_of(cell.write) >= block.threads) {
      bad_access("a tensor copy is still under way", size, write, atomic, place, "; wait for its mbarrier");
    }
    bad_access("a cp.async is still under way", size, write, atomic, place,
               "; wait for its group, then synchronise");
  }
  if (shared && !fresh && (!write || atomic)) {
    bad_access("uninitialised shared memory", size, write, atomic, place, "");
  }
  if (unordered(cell.write, shared) && !(atomic && atomic_of(cell.write)))
    race(cell.write, true, shared, size, write, atomic, place);
  const Stamp now = stamp(current->clock, atomic);
  if (write) {
    for (const Stamp& read : cell.reads) {
      if (unordered(read, shared) && !(atomic && atomic_of(read)))
        race(read, false, shared, size, write, atomic, place);
    }
    cell.write = now;
  } else if (cell.reads[0] != now) {
    const Stamp last = cell.reads[0];
    if (serial_of(last) == block.serial && thread_of(last) != current->id) {
      cell.reads[thread_of(last) / 32 == current->id / 32 ? 1 : 2] = last;
    }
    cell.reads[0] = now;
  }
}

// Returns the access records of the `size` bytes at `address`, or raises an error if a kernel may not access
// them. Returns null for memory without records: the stack of the current thread, and constants.
Cell* find(uintptr_t address, size_t size, bool write, bool atomic, const Place& place, bool& shared) {
  shared = false;
  const uintptr_t stack = reinterpret_cast<uintptr_t>(stacks) + current->id * kStack;
  if (address - stack < kStack) {
    for (const auto& r : current->busy) {
      if (address < r.end && address + size > r.begin && (write || !r.readable)) {
        bad_access("a wgmma is still under way with this register", size, write, atomic, place,
                   "; wait for its group");
      }
    }
    return nullptr;
  }
  if (address >= last_begin && address + size <= last_end) return last_cells + (address - last_begin);
  shared = true;
  if (address - module.shared < module.shared_size && address + size <= module.shared + module.shared_size) {
    return module.cells + (address - module.shared);
  }
  const auto dynamic = reinterpret_cast<uintptr_t>(block.dynamic);
  if (address >= dynamic && address + size <= dynamic + block.shared_bytes)
    return dynamic_cells.data() + (address - dynamic);
  shared = false;
  // The lock must be released before bad_access(), which leaves this function by a jump.
  {
    const std::lock_guard lock(memories_lock);
    if (auto after = memories.upper_bound(address); after != memories.begin()) {
      auto& [begin, memory] = *std::prev(after);
      if (address + size <= begin + memory.size) {
        last_begin = begin;
        last_end = begin + memory.size;
        last_cells = cells_of(memory);
        return last_cells + (address - begin);
      }
    }
  }
  if (!write && address >= module.begin && address + size <= module.end) return nullptr;
  bad_access("out of bounds", size, write, atomic, place, "");
}

}  // namespace

void bad_access(const char* what, size_t size, bool write, bool atomic, const Place& place,
                const std::string& rest) {
  fail(std::string(what) + ": " + kind(write, atomic) + " " + std::to_string(size) + " bytes at " +
       text_of(place) + rest);
}

void check(const void* pointer, size_t size, bool write, bool atomic, const Place& place) {
  if (!in_kernel()) return;  // the access belongs to host code or to static initialisation
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  bool shared;
  Cell* cells = find(address, size, write, atomic, place, shared);
  if (cells == nullptr) return;
  for (size_t i = 0; i < size; ++i) check_cell(cells[i], shared, size, write, atomic, place);
}

void check_aligned(const void* address, size_t size, bool write, const Place& place) {
  if (in_kernel() && reinterpret_cast<uintptr_t>(address) % size != 0) {
    bad_access("misaligned", size, write, false, place, "");
  }
  check(address, size, write, false, place);
}

bool is_shared(const void* address, size_t size) {
  bool shared;
  find(reinterpret_cast<uintptr_t>(address), size, false, false, {}, shared);
  return shared;
}

void begin_write(const void* address, size_t size, int agent, const Place& place) {
  check(address, size, true, false, place);
  bool shared;
  Cell* cells = find(reinterpret_cast<uintptr_t>(address), size, true, false, place, shared);
  for (size_t i = 0; i < size; ++i) cells[i].write = stamp(agent, kInFlight, false);
}

void end_write(const void* address, size_t size, int agent, uint32_t clock) {
  const auto dynamic = reinterpret_cast<uintptr_t>(block.dynamic), at = reinterpret_cast<uintptr_t>(address);
  Cell* cells = at - dynamic < static_cast<size_t>(block.shared_bytes) ? dynamic_cells.data() + (at - dynamic)
                                                                       : module.cells + (at - module.shared);
  for (size_t i = 0; i < size; ++i) cells[i].write = stamp(agent, clock, false);
}

uint64_t begin_read(const void* address, size_t size, const Place& place) {
  check(address, size, false, false, place);
  bool shared;
  Cell* cells = find(reinterpret_cast<uintptr_t>(address), size, false, false, place, shared);
  if (!shared) bad_access("wgmma reads shared memory only", size, false, false, place, "");
  uint64_t writes = 0;
  for (size_t i = 0; i < size; ++i) {
    const int writer = thread_of(cells[i].write);
    if (writer < block.threads && clock_of(cells[i].write) > threads[writer].fenced) {
      bad_access(
          "not fenced", size, false, false, place,
          ", which thread " + std::to_string(writer) + " wrote and which no async_fence() follows there");
    }
    writes = writes * 31 + cells[i].write;
    cells[i].reads[0] = stamp(kInFlight, false);
  }
  return writes;
}

bool end_read(const void* address, size_t size, uint64_t begun) {
  bool shared;
  Cell* cells = find(reinterpret_cast<uintptr_t>(address), size, false, false, {}, shared);
  const Stamp flying = stamp(kInFlight, false), now = stamp(current->clock, false);
  uint64_t writes = 0;
  for (size_t i = 0; i < size; ++i) {
    writes = writes * 31 + cells[i].write;
    bool found = false;
    for (Stamp& read : cells[i].reads) {
      if (read == flying) read = now, found = true;
    }
    // if later reads have replaced the record of this read, record it again
    if (!found) cells[i].reads[0] = now;
  }
  return writes == begun;
}

void begin_block() {
  static std::thread::id thread;
  // each thread of the process has its own thread-local storage, so its own shared memory
  if (std::this_thread::get_id() != thread) {
    std::free(module.cells);
    module = find_module();
    thread = std::this_thread::get_id();
  }
  if (dynamic_cells.size() < static_cast<size_t>(block.shared_bytes))
    dynamic_cells.resize(block.shared_bytes);
}

void check_read(const void* address, size_t size, Where where) {
  check(address, size, false, false, {nullptr, where});
}
void check_write(const void* address, size_t size, Where where) {
  check(address, size, true, false, {nullptr, where});
}
void check_atomic(const void* address, size_t size, Where where) {
  check(address, size, true, true, {nullptr, where});
}

void check_matrix_row(const void* row, Where where) {
  const Place place{nullptr, where};
  check_aligned(row, 16, false, place);
  bool shared;
  find(reinterpret_cast<uintptr_t>(row), 16, false, false, place, shared);
  if (!shared) bad_access("ldmatrix reads shared memory only", 16, false, false, place, "");
}

void add_memory(void* begin, size_t size) {
  const std::lock_guard lock(memories_lock);
  if (size > 0) memories.insert_or_assign(reinterpret_cast<uintptr_t>(begin), Memory{size});
}

bool knows_memory(void* address) {
  const auto a = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(memories_lock);
  const auto after = memories.upper_bound(a);
  return after != memories.begin() && a < std::prev(after)->first + std::prev(after)->second.size;
}

void remove_memory(void* begin) {
  const std::lock_guard lock(memories_lock);
  if (reinterpret_cast<uintptr_t>(begin) == last_begin) last_begin = 1, last_end = 0;
  memories.erase(reinterpret_cast<uintptr_t>(begin));
}

}  // namespace simt
