#pragma once

#include "config/fields.h"
#include "config/fleet.h"

namespace bulkhead::config {

/// Reads what a fleet file says beside its models. Call after the models were read.
void read_fleet_settings(Fields& fields, Fleet& fleet);

}  // namespace bulkhead::config
