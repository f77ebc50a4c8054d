#include "supervisor/fleet/footprint_file.h"

#include <spdlog/spdlog.h>

namespace bulkhead::supervisor {

FootprintFile::FootprintFile(const LogStore& logs)
    : file_{logs.folder / "footprints.json", KeeperFile::Of::every_keeper}, writer_{logs.writer} {}

memory::Footprints FootprintFile::load() const {
    const auto content = file_.load();
    const json::value* known = content ? content->if_contains("footprints") : nullptr;
    return known == nullptr ? memory::Footprints{} : memory::Footprints::from_json(*known);
}

void FootprintFile::save(const memory::Footprints& footprints) const {
    writer_->save("footprints", [file = file_, footprints] {
        if (const auto saved = file.save({{"footprints", footprints.to_json()}}); !saved)
            spdlog::warn("{}; the next daemon measures again", saved.error().attempt);
    });
}

}  // namespace bulkhead::supervisor
