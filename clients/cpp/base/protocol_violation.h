#pragma once

#include <string>
#include <utility>

#include "ipc/base/error.h"

namespace bulkhead {

/// The error for a peer that broke its protocol; usually it is of another release.
[[nodiscard]] inline Error protocol_violation(std::string attempt) {
    return {ErrorCode::protocol_violation, std::move(attempt), "use a client and a daemon of matching releases"};
}

}  // namespace bulkhead
