// Collectives between processes of one machine, as the xccl_* fields of Paddle's device interface.
#pragma once
#include "paddle/phi/backends/device_ext.h"

namespace reference {

void fill_collectives(C_DeviceInterface* interface);

}  // namespace reference
