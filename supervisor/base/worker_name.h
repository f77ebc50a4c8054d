#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "ipc/links/keeper_link.h"

namespace bulkhead::supervisor {

/// The name of a worker everywhere: ps, receipts, channels, logs, the keeper.
struct WorkerName {
    std::string model;  ///< at most 63 bytes
    std::uint32_t replica = 0;
    std::uint64_t generation = 0;  ///< rises with every spawn of the daemon; never reused

    /// "minilm/0"
    [[nodiscard]] std::string label() const { return model + "/" + std::to_string(replica); }
    /// "minilm/0#3"
    [[nodiscard]] std::string text() const { return label() + "#" + std::to_string(generation); }

    [[nodiscard]] keeper_link::WorkerKey key() const {
        keeper_link::WorkerKey key{{}, replica, 0, generation};
        model.copy(key.model.data(), key.model.size() - 1);
        return key;
    }
    [[nodiscard]] static WorkerName from(const keeper_link::WorkerKey& key) {
        return {std::string{key.model.begin(), std::ranges::find(key.model, '\0')}, key.replica, key.generation};
    }
    friend bool operator==(const WorkerName&, const WorkerName&) = default;
};

}  // namespace bulkhead::supervisor
