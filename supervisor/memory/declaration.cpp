#include "supervisor/memory/declaration.h"

#include <map>

#include <fmt/format.h>

#include "ipc/base/text.h"
#include "supervisor/memory/limits.h"

namespace bulkhead::supervisor::memory {
namespace {

Error invalid(std::string attempt, std::string remedy) {
    return {ErrorCode::config_invalid, std::move(attempt), std::move(remedy)};
}

void check_memory(const Declaration& model, std::vector<Error>& errors) {
    if (!model.memory) return;
    if (*model.memory == 0)
        errors.push_back(invalid(fmt::format("model \"{}\": memory = 0", model.model),
                                 "declare what it needs, or leave `memory` out: it is measured at the first load"));
    if (*model.memory > limits::bytes_max)
        errors.push_back(invalid(fmt::format("model \"{}\": memory = {}", model.model, bytes_text(*model.memory)),
                                 fmt::format("at most {}", bytes_text(limits::bytes_max))));
}

}  // namespace

std::vector<Error> check(const std::vector<Declaration>& models) {
    std::vector<Error> errors;
    std::map<std::string, const Declaration*> first_of_group;
    for (const Declaration& model : models) {
        check_memory(model, errors);
        if (model.replicas_min == 0 || model.replicas_min > model.replicas_max)
            errors.push_back(invalid(fmt::format("model \"{}\": replicas min {}, max {}", model.model,
                                                 model.replicas_min, model.replicas_max),
                                     "min is at least 1 and at most max"));
        if (!model.group) continue;
        const auto [known, is_first] = first_of_group.try_emplace(model.group->name, &model);
        if (is_first) continue;
        const Declaration& first = *known->second;
        if (first.group->kind != model.group->kind)
            errors.push_back(invalid(fmt::format("group \"{}\" is exclusive by one of \"{}\" and \"{}\", and together "
                                                 "by the other",
                                                 model.group->name, first.model, model.model),
                                     "give both the same kind, or name two groups"));
    }
    return errors;
}

std::optional<Error> check(const DeviceId& device, const DeviceLimit& limit) {
    if (limit.share_percent < 1 || limit.share_percent > 100)
        return invalid(fmt::format("limits of {}: share = {} %", device, limit.share_percent), "from 1 % to 100 %");
    if (limit.margin > limits::bytes_max)
        return invalid(fmt::format("limits of {}: margin = {}", device, bytes_text(limit.margin)),
                       fmt::format("at most {}", bytes_text(limits::bytes_max)));
    return std::nullopt;
}

}  // namespace bulkhead::supervisor::memory
