#pragma once

#include <filesystem>
#include <string>

#include "tests/integration/fixture/process.h"

namespace bulkhead::soak {

/// A fleet of `workers` preloaded models "m0", "m1" … , and the programs that serve it.
struct SoakFleet {
    std::string yaml;
    test::SpawnOptions options;
};
[[nodiscard]] SoakFleet make_fleet(const std::string& model, int workers, bool preload);

}  // namespace bulkhead::soak
