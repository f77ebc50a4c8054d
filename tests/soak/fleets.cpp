#include "tests/soak/fleets.h"

#include "tests/integration/fixture/fleets.h"

namespace bulkhead::soak {

SoakFleet make_fleet(const std::string& kind, int models) {
    SoakFleet fleet;
    fleet.yaml = test::fleet({});
    for (int i = 0; i < models; ++i) {
        const std::string name = "m" + std::to_string(i);
        if (kind == "minimal") {
            fleet.yaml += test::minimal_model(name);
        } else {
            std::string model = test::silero_vad();
            fleet.yaml += model.replace(model.find("silero-vad"), 10, name);
        }
    }
    if (kind == "minimal") fleet.options.programs = test::minimal_programs();
    return fleet;
}

}  // namespace bulkhead::soak
