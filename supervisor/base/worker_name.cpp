#include "supervisor/base/worker_name.h"

#include <algorithm>

namespace bulkhead::supervisor {

keeper_link::WorkerKey WorkerName::key() const {
    keeper_link::WorkerKey key{};
    std::copy_n(model.begin(), std::min(model.size(), key.model.size() - 1), key.model.begin());
    key.replica = replica;
    key.generation = generation;
    return key;
}

WorkerName WorkerName::from(const keeper_link::WorkerKey& key) {
    const auto end = std::find(key.model.begin(), key.model.end(), '\0');
    return {std::string{key.model.begin(), end}, key.replica, key.generation};
}

}  // namespace bulkhead::supervisor
