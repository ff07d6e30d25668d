// Kernels of the device: every CPU kernel of Paddle, run in the device's stream.
#pragma once

namespace reference {

void register_kernels();

}  // namespace reference
