// Memory of the device: of a chosen size, and overwritten when it is used again.
#pragma once
#include <cstddef>

namespace reference {

// Bytes of this process on the device.
struct MemoryFigures {
  size_t used, peak;
};

// nullptr: there is not as much left.
void* allocate(size_t bytes);
// False: it was not allocated here.
bool deallocate(void* pointer);
MemoryFigures memory_figures();
void reset_peak();

}  // namespace reference
