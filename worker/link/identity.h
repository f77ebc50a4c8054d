#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ipc/base/error.h"

namespace bulkhead::worker {

/// This process' identity, as the keeper put it into $BULKHEAD_WORKER.
struct Identity {
    std::string daemon_token;
    std::string model;
    std::uint32_t replica = 0;
    std::uint64_t generation = 0;

    /// Whether it was started before its model is known.
    [[nodiscard]] bool is_blank() const { return model == "_blank"; }
    friend bool operator==(const Identity&, const Identity&) = default;

    /// From "<daemon token>:<model>/<replica>#<generation>".
    /// Errors  config_invalid naming the text
    static Result<Identity> parse(std::string_view text);
};

}  // namespace bulkhead::worker
