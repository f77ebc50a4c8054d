#pragma once

#include <string>
#include <vector>

#include "config/fleet.h"

namespace bulkhead::supervisor {

/// What a reload finds: names of models, in the order of the files.
struct FleetChange {
    std::vector<std::string> added;
    std::vector<std::string> removed;
    std::vector<std::string> changed;  ///< another declaration or model file than their process has
    std::vector<std::string> unchanged;

    bool limits_changed = false;  ///< or what starts without a request

    [[nodiscard]] bool is_nothing() const {
        return added.empty() && removed.empty() && changed.empty() && !limits_changed;
    }
};

/// `replaced_files`  models whose process loaded a file that was replaced since
[[nodiscard]] FleetChange compare(const config::Fleet& from, const config::Fleet& to,
                                  const std::vector<std::string>& replaced_files);

}  // namespace bulkhead::supervisor
