#pragma once

namespace simdev {

/// Registers the device with PyTorch: its name, allocators and hooks. Call it once the library is loaded.
void register_backend();

}  // namespace simdev
