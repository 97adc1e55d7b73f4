#pragma once

// What the emulator's files share. One launch runs at a time, one block after another, on the calling thread.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "simt.h"

namespace simt {

constexpr int kMaxThreads = 1024;  // of a block, with its mbarriers: see Thread::known
constexpr size_t kStack = 256 << 10;

// What a thread has seen of the others: a clock counts a thread's synchronisations, and an access is ordered
// before everything that happens after its thread's clock at that time has become known.
using Clocks = std::shared_ptr<const std::vector<uint32_t>>;

struct Thread {
  int id = 0;
  uint32_t clock = 1;
  Clocks known;  // by thread, as of the last barriers; behind them, by mbarrier: its phases that are known to
                 // be over
  uint32_t known_lanes[32] = {};  // of the own warp, as of the last warp-level synchronisations

  bool done = true, waiting = false;
  const char* at = nullptr;  // what it waits at, and where in the source
  Where where;
  unsigned mask = 0;  // of a warp's operation; 0 at a barrier
  const void* in = nullptr;
  void* out = nullptr;

  uint32_t fenced = 0;  // of what it wrote up to this clock, tensor copies and wgmma know
  // Registers of wgmma that are under way: their begin and end on the stack; those of A may still be read.
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

// The block that runs.
struct Block {
  uint32_t serial = 0;        // counts blocks over all launches
  uint32_t launch_first = 0;  // the serial of this launch's first block
  int64_t index = 0, blocks = 0;
  int threads = 0, shared_bytes = 0;
  unsigned char* dynamic = nullptr;
};

extern Block block;
extern std::vector<Thread> threads;
extern Thread* current;  // null while no kernel's thread runs
extern char* stacks;     // kMaxThreads of kStack bytes

std::string relative(const std::string& file);  // to the project
std::string text_of(Where where);

// scheduler.cpp
void wait_at(const char* name, Where where);  // until somebody clears `waiting`
// collectives.cpp
void forget_collectives();
void learn(std::vector<uint32_t>& known, const std::vector<uint32_t>& more);
void learn_from(std::vector<uint32_t>& known,
                const Thread& thread);  // what it knows, but not what it did itself
// memory.cpp
void begin_block();
// copies.cpp
void begin_copies();
void finish_thread();  // nothing may be under way

// Where in the source an access stands: from the compiler's call, whose address is looked up only for a
// message, or given.
struct Place {
  const void* code = nullptr;
  Where where;
};
void check(const void* address, size_t size, bool write, bool atomic, const Place& place);
bool is_shared(const void* address, size_t size);
// A write that another agent does, from now on until end_write(): to shared memory that nobody touches in
// between.
void begin_write(const void* address, size_t size, int agent, const Place& place);
void end_write(const void* address, size_t size, int agent, uint32_t clock);
// A read by the tensor cores, from now on until end_read(), which says whether somebody wrote in between.
uint64_t begin_read(const void* address, size_t size, const Place& place);
bool end_read(const void* address, size_t size, uint64_t begun);
// mbarrier.cpp
void begin_mbarriers();
bool deliver();                    // what is under way, until somebody can go on
const char* left_in_block();       // what is still under way when all threads have returned, or null
std::string state_of_mbarriers();  // those that somebody waits for
// wgmma.cpp
void begin_wgmma();
const char* left_in_wgmma();
void check_aligned(const void* address, size_t size, bool write, const Place& place);  // to its size, too
[[noreturn]] void bad_access(const char* what, size_t size, bool write, bool atomic, const Place& place,
                             const std::string& rest);
// instrumentation.cpp
std::string text_of(const Place& place);
// For its lifetime, a fault in a kernel ends the launch, not the process.
class CaughtFaults {
 public:
  CaughtFaults();
  ~CaughtFaults();
};

}  // namespace simt
