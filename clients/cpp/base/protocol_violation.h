#pragma once

#include <string>
#include <utility>

#include "ipc/base/error.h"

namespace bulkhead {

/// A peer that broke its protocol: most often it is of another release.
[[nodiscard]] inline Error protocol_violation(std::string attempt) {
    return {ErrorCode::protocol_violation, std::move(attempt), "use a client and a daemon of matching releases"};
}

}  // namespace bulkhead
