#pragma once

#include <string>

#include "tests/integration/fixture/process.h"

namespace bulkhead::soak {

/// A fleet of models "m0", "m1" … of one kind (minimal, silero-vad), and the programs that serve it.
struct SoakFleet {
    std::string yaml;
    test::SpawnOptions options;
};
[[nodiscard]] SoakFleet make_fleet(const std::string& kind, int models);

}  // namespace bulkhead::soak
