#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <shoestring/core/amp.h>

#include <map>
#include <optional>
#include <string>

#include "options.h"

/// Returns the device that --device names, and makes it the current device of its type. "auto" is the
/// accelerator, or the CPU if there is none. For any other name than "cpu", loads the CUDA libraries of
/// LibTorch and of shoestring, if the system has the driver. Call it before anything else asks LibTorch for a
/// GPU. Raises InputError if the machine has no such device, or if --precision does not fit the device.
at::Device find_device(const LoopOptions& options);

/// Returns the dtype in which trained weights are stored (--weights).
at::ScalarType weight_dtype(const LoopOptions& options);
/// Returns the dtype in which frozen weights are stored: that of matrix products (--precision).
at::ScalarType base_dtype(const LoopOptions& options);

/// Switches autocast to bf16 or fp16 on while the result lives, if --precision says so.
std::optional<shoestring::AutocastGuard> autocast(const LoopOptions& options, at::Device device);

/// Returns the memory of a device in bytes, as its allocator reports it: "allocated" now, its "peak", and
/// what the allocator has "reserved". Empty for the CPU, and for devices whose allocator does not report.
std::map<std::string, int64_t> device_memory(at::Device device);

/// Returns the peak memory of the process (VmHWM), in bytes.
int64_t peak_memory();

/// Returns a text on the peak memory of the process and the memory of the device, in MiB.
std::string memory_text(at::Device device);
