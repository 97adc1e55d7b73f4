#pragma once

// Declarations that the emulator's source files share. Only one kernel launch runs at a time, on the thread
// that called run(), and its blocks run one after the other.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "simt.h"

namespace simt {

constexpr int kMaxThreads = 1024;  // limit for threads plus mbarriers of a block: see Thread::known
constexpr size_t kStack = 256 << 10;

// A vector clock: what one thread knows about all threads. A thread's own clock counts its synchronisations.
// Once another thread knows a clock of this thread, all accesses up to that clock happened before everything
// that follows in the other thread.
using Clocks = std::shared_ptr<const std::vector<uint32_t>>;

struct Thread {
  int id = 0;
  uint32_t clock = 1;
  // Known clocks as of the last barriers. The first entries are the clocks of the block's threads. Then
  // follows, for each mbarrier, the number of its phases that are known to be over.
  Clocks known;
  // known clocks of the lanes of this thread's warp, as of the last warp-level synchronisations
  uint32_t known_lanes[32] = {};

  bool done = true, waiting = false;
  const char* at = nullptr;  // name of the operation in which the thread waits; `where` is its source line
  Where where;
  unsigned mask = 0;  // lane mask of the warp operation in which the thread waits; 0 at a barrier
  const void* in = nullptr;
  void* out = nullptr;

  uint32_t fenced = 0;  // tensor copies and wgmma see the writes that the thread did up to this clock
  // Registers of a wgmma in flight, as a range of addresses on the stack. The thread must not write them; if
  // `readable` (operand a), it may read them.
  struct Registers {
    uintptr_t begin, end;
    bool readable;
  };
  std::vector<Registers> busy;

  bool knows(int other, uint32_t at_clock) const {
    if (other == id || (other < static_cast<int>(known->size()) && at_clock <= (*known)[other])) return true;
    return other / 32 == id / 32 && at_clock <= known_lanes[other % 32];
  }
};

// The thread block that is running.
struct Block {
  uint32_t serial = 0;        // number of the block, counted over all launches of the process
  uint32_t launch_first = 0;  // serial number of the first block of the current launch
  int64_t index = 0, blocks = 0;
  int threads = 0, shared_bytes = 0;
  unsigned char* dynamic = nullptr;
};

extern Block block;
extern std::vector<Thread> threads;
extern Thread* current;  // the thread of a kernel that is running; null if none is
extern char* stacks;     // the stacks of kMaxThreads threads, kStack bytes each

/// Returns whether the caller is a thread of a kernel. While a kernel runs, other threads of the process may
/// run host code that is compiled with kernels.
inline bool in_kernel() {
  const auto frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  return current != nullptr && frame - reinterpret_cast<uintptr_t>(stacks) < kMaxThreads * kStack;
}

// A kernel: its name with template arguments, the name of its source file, and the size of its __shared__
// variables. kernel_at() is defined in symbols.cpp.
struct Kernel {
  std::string name, file;
  int shared_bytes;
};
const Kernel& kernel_at(const void* function);

std::string relative(const std::string& file);  // returns the path relative to the project folder
std::string text_of(Where where);

// The following function is defined in scheduler.cpp.
void wait_at(const char* name, Where where);  // waits until another thread clears this thread's `waiting`
// The following functions are defined in collectives.cpp.
void forget_collectives();
void learn(std::vector<uint32_t>& known, const std::vector<uint32_t>& more);
// Merges the vector clock of `thread` into `known`, without the thread's own clock.
void learn_from(std::vector<uint32_t>& known, const Thread& thread);
// The following function is defined in memory.cpp.
void begin_block();
// The following two functions are defined in copies.cpp.
void begin_copies();
void finish_thread();  // called when a thread returns; raises an error if one of its copies is in flight

// The source line of a memory access. `code` is the return address of the call that the compiler inserted; it
// is looked up only for an error message. If `code` is null, `where` is the line.
struct Place {
  const void* code = nullptr;
  Where where;
};
void check(const void* address, size_t size, bool write, bool atomic, const Place& place);
bool is_shared(const void* address, size_t size);
// Begins a write to shared memory by an agent, such as an asynchronous copy, instead of by a thread's store.
// Until end_write(), no thread may access these bytes.
void begin_write(const void* address, size_t size, int agent, const Place& place);
void end_write(const void* address, size_t size, int agent, uint32_t clock);
// Begins a read of shared memory by the tensor cores. end_read() returns true if no thread wrote to these
// bytes in between.
uint64_t begin_read(const void* address, size_t size, const Place& place);
bool end_read(const void* address, size_t size, uint64_t begun);
// The following functions are defined in mbarrier.cpp.
void begin_mbarriers();
bool deliver();  // completes tensor copies in flight, one by one, until a waiting thread can continue
// Called when all threads have returned. Returns an error if tensor copies are still in flight, else null.
const char* left_in_block();
// returns a description of the mbarriers that threads wait for, for an error message
std::string state_of_mbarriers();
// The following two functions are defined in wgmma.cpp.
void begin_wgmma();
const char* left_in_wgmma();
// Checks an access like check(), and that its address is a multiple of its size.
void check_aligned(const void* address, size_t size, bool write, const Place& place);
[[noreturn]] void bad_access(const char* what, size_t size, bool write, bool atomic, const Place& place,
                             const std::string& rest);
// The following class is defined in instrumentation.cpp.
std::string text_of(const Place& place);
// While an object of this class exists, processor faults in a kernel become errors of the launch. Otherwise
// they end the process.
class CaughtFaults {
 public:
  CaughtFaults();
  ~CaughtFaults();
};

}  // namespace simt
