#pragma once

// Declarations that the emulator's source files share. One launch runs at a time, one block after another, on
// the calling thread.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "simt.h"

namespace simt {

constexpr int kMaxThreads = 1024;  // threads and mbarriers of a block together: see Thread::known
constexpr size_t kStack = 256 << 10;

// The knowledge of one thread about all threads (a vector clock). A thread's clock counts its
// synchronisations. An access happens before everything that follows once its thread's clock at that time is
// known.
using Clocks = std::shared_ptr<const std::vector<uint32_t>>;

struct Thread {
  int id = 0;
  uint32_t clock = 1;
  // Known clocks: of each thread as of the last barriers, then of each mbarrier the number of its phases that
  // are known to be over.
  Clocks known;
  uint32_t known_lanes[32] = {};  // clocks of the own warp, as of the last warp-level synchronisations

  bool done = true, waiting = false;
  const char* at = nullptr;  // where the thread waits: name, then place in the source
  Where where;
  unsigned mask = 0;  // mask of the warp operation that the thread waits in; 0 at a barrier
  const void* in = nullptr;
  void* out = nullptr;

  uint32_t fenced = 0;  // tensor copies and wgmma see what the thread wrote up to this clock
  // Registers of a wgmma in flight: begin and end of their addresses on the stack. Registers of operand a may
  // still be read.
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

// The block that is running.
struct Block {
  uint32_t serial = 0;        // number of the block, counted over all launches
  uint32_t launch_first = 0;  // the serial of the first block of this launch
  int64_t index = 0, blocks = 0;
  int threads = 0, shared_bytes = 0;
  unsigned char* dynamic = nullptr;
};

extern Block block;
extern std::vector<Thread> threads;
extern Thread* current;  // null while no thread of a kernel runs
extern char* stacks;     // kMaxThreads stacks of kStack bytes

std::string relative(const std::string& file);  // returns the path relative to the project folder
std::string text_of(Where where);

// Defined in scheduler.cpp.
void wait_at(const char* name, Where where);  // waits until another thread clears `waiting`
// Defined in collectives.cpp.
void forget_collectives();
void learn(std::vector<uint32_t>& known, const std::vector<uint32_t>& more);
// Adds what the thread knows about others, but not what it did itself.
void learn_from(std::vector<uint32_t>& known, const Thread& thread);
// Defined in memory.cpp.
void begin_block();
// Defined in copies.cpp.
void begin_copies();
void finish_thread();  // raises an error if a copy is still in flight

// The place of an access in the source. `code` is the address of the compiler's call, which is looked up only
// for a message. Without it, `where` gives the place.
struct Place {
  const void* code = nullptr;
  Where where;
};
void check(const void* address, size_t size, bool write, bool atomic, const Place& place);
bool is_shared(const void* address, size_t size);
// Begins a write to shared memory by another agent, a copy for instance. Until end_write(), no thread may
// access these bytes.
void begin_write(const void* address, size_t size, int agent, const Place& place);
void end_write(const void* address, size_t size, int agent, uint32_t clock);
// Begins a read by the tensor cores. end_read() returns true if no thread wrote to these bytes in between.
uint64_t begin_read(const void* address, size_t size, const Place& place);
bool end_read(const void* address, size_t size, uint64_t begun);
// Defined in mbarrier.cpp.
void begin_mbarriers();
bool deliver();  // completes copies in flight until a thread can continue
// Returns an error if copies are still in flight when all threads have returned, else null.
const char* left_in_block();
std::string state_of_mbarriers();  // describes the mbarriers that threads wait for
// Defined in wgmma.cpp.
void begin_wgmma();
const char* left_in_wgmma();
// Also checks that the address is a multiple of the size.
void check_aligned(const void* address, size_t size, bool write, const Place& place);
[[noreturn]] void bad_access(const char* what, size_t size, bool write, bool atomic, const Place& place,
                             const std::string& rest);
// Defined in instrumentation.cpp.
std::string text_of(const Place& place);
// Turns faults in a kernel into errors of the launch, during its own lifetime. Without it they end the
// process.
class CaughtFaults {
 public:
  CaughtFaults();
  ~CaughtFaults();
};

}  // namespace simt
