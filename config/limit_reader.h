#pragma once

#include "config/fields.h"
#include "config/fleet.h"

namespace bulkhead::config {

/// Reads what a fleet file says beside its models, which are read before.
void read_fleet_settings(Fields& fields, Fleet& fleet);

}  // namespace bulkhead::config
