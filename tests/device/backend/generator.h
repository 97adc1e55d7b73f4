#pragma once

// The random generators of the devices. Each has a CPU generator, which draws the numbers in the threads of
// streams. Operations that use one generator run in the order in which the host added them, so that results
// equal the CPU's for equal seeds.

#include <functional>

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include "streams.h"

namespace simdev {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

/// The use of a generator by an operation.
class Draw {
 public:
  /// `generator` must be a generator of this device type; if it is not defined, the default one is used.
  Draw(const at::Generator& generator, int device, const char* operation);

  const at::Generator& cpu_generator() const;
  /// Waits in the stream's thread until the operations that used the generator earlier are over.
  void wait_for_earlier() const;
  /// Makes later users of the generator wait for this operation.
  void set_position(const Position& position);

 private:
  at::Generator generator_;
  Position earlier_;
};

}  // namespace simdev
