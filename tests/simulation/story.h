#pragma once

#include <string>

#include "tests/simulation/world.h"

namespace bulkhead::simulation {

/// One line: for who reads how a history came to its end.
[[nodiscard]] std::string text_of(const Event& event);
[[nodiscard]] std::string text_of(const Action& action);

}  // namespace bulkhead::simulation
