#pragma once

#include "config/fields.h"
#include "config/fleet.h"

namespace bulkhead::config {

/// Reads `limits` and `startup` of a fleet file whose models are read.
void read_limits_and_startup(Fields& fields, Fleet& fleet);

}  // namespace bulkhead::config
