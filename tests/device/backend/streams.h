#pragma once

// Streams: each is a thread with a queue of operations. The host adds operations; when a stream runs them
// depends on the mode.

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

#include "clocks.h"
#include "detector.h"

namespace simdev {

/// How operations are timed, and what is checked.
struct Config {
  // Streams run only operations that somebody waits for. Otherwise they run operations as soon as they can.
  std::atomic<bool> lazy{false};
  // Every fourth operation begins late, by a random time of at most this many microseconds.
  std::atomic<int> delay_us{0};
  std::atomic<uint64_t> seed{0};
  // The host waits for each operation, as with CUDA_LAUNCH_BLOCKING=1.
  std::atomic<bool> blocking{false};
  // shoestring's operators run their host functions of CUDA and emulated kernels. Otherwise they run the CPU
  // kernels in the stream's thread.
  std::atomic<bool> emulate{false};
  // Findings contain the Python stack of the earlier operation, too. Every operation then takes longer.
  std::atomic<bool> stacks{false};
};
Config& config();

/// Guards all records of the host: clocks of streams, blocks of memory, accesses and findings. A thread never
/// waits for a stream while it holds this lock.
std::mutex& records();

/// A position in a stream: the number of the operation that comes last before it.
struct Position {
  int stream = 0;
  uint64_t number = 0;
};

/// Returns the stream that is current on the calling thread for a device, as an index over all devices.
int current_stream(int device);
int current_device();
void set_current_stream(int stream);
void set_current_device(int device);
inline int device_of_stream(int stream) { return stream / kStreamsPerDevice; }
c10::Stream to_c10(int stream);
int from_c10(const c10::Stream& stream);
/// Returns a stream of the device's pool; consecutive calls return different ones.
int next_pool_stream(int device);

struct Operation {
  const char* name = "";  // lives as long as the process
  std::function<void()> run;
  std::vector<Range> accesses;  // ranges of the addresses that tensors hold
  bool is_kernel = true;        // is left out once a kernel has failed
};

/// Adds an operation to a stream, after its accesses were checked. Raises the error of an earlier kernel.
Position enqueue(int stream, Operation operation);
/// Does the same for a caller that holds records(), and raises nothing.
Position enqueue_locked(int stream, Operation operation);

/// Returns the stream's present position and clock.
Position position_of(int stream);
const Clock& clock_locked(int stream);
/// Orders what follows in the stream after `clock`, in the records only.
void order_locked(int stream, const Clock& clock);

/// Returns whether a stream has passed a position. If not, the stream will go on until there.
bool is_over(Position position);
/// Waits until a stream has passed a position. For the detector, the host learns nothing from it.
void wait_silently(Position position);
/// Waits, and the host knows afterwards that everything in `clock` is over. Raises the error of a kernel.
/// `reason` is for the list of synchronisations.
void synchronize(Position position, const Clock& clock, const char* reason);
void synchronize_stream(int stream, const char* reason);
/// Notes that the host knows that everything in `clock` is over, as after a wait.
void host_knows(const Clock& clock);

/// Raises the error of a kernel that has failed, at every call until clear_error().
void check_error();
void clear_error();

/// Returns whether the calling thread is a stream's.
bool is_stream_thread();

/// Returns what the host has waited for since the last call, in order.
std::vector<std::string> take_synchronisations();
int64_t count_synchronisations();
int64_t count_operations();

}  // namespace simdev
