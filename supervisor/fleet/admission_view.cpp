// What people see of the memory policy: plans, reasons, footprints, the ledger.

#include "supervisor/fleet/admission.h"

namespace bulkhead::supervisor {
namespace {

json::object to_json(const memory::Usage& usage) {
    return {{"at_ready", usage.at_ready},
            {"load_peak", usage.load_peak},
            {"serving_peak", usage.serving_peak},
            {"graph_pools", usage.graph_pools},
            {"slabs", usage.slabs},
            {"mapped", usage.mapped}};
}

}  // namespace

json::object Admission::plan(const std::string& model) const {
    const memory::Plan plan = policy_->plan(model, Deadline::Clock::now());
    json::array pieces;
    for (const auto& piece : plan.pieces)
        pieces.push_back(json::object{{"replica", piece.who.replica},
                                      {"model", piece.who.model},
                                      {"device", devices_.at(piece.device).text},
                                      {"bytes", piece.device_bytes},
                                      {"host_bytes", piece.host_bytes},
                                      {"basis", memory::to_string(piece.basis)}});
    json::array victims;
    for (const auto& victim : plan.victims)
        victims.push_back(json::object{{"model", victim.model}, {"replica", victim.replica}});
    return {{"model", model},
            {"outcome", memory::to_string(plan.outcome)},
            {"loads", std::move(pieces)},
            {"evicts", std::move(victims)},
            {"expected_ms", plan.expected ? json::value(plan.expected->count()) : json::value(nullptr)},
            {"reason", plan.why}};
}

std::string Admission::why(const std::string& model) const {
    return plans(model) ? policy_->why(model, Deadline::Clock::now()) : std::string{};
}

json::object Admission::footprint(const std::string& model) const {
    json::object result{{"estimated", nullptr}, {"measured", nullptr}};
    const auto file = files_.find(model);
    if (const auto spec = planned_.find(model); file != files_.end() && file->second.estimate)
        result["estimated"] = *file->second.estimate;
    else if (spec != planned_.end() && spec->second->declared_bytes)
        result["estimated"] = *spec->second->declared_bytes;
    if (const memory::Footprint* known = policy_->footprints().find(key_of(model)))
        result["measured"] = json::object{{"device", to_json(known->device)},
                                          {"host", to_json(known->host)},
                                          {"load_ms", known->load.count()},
                                          {"count", known->count},
                                          {"time", known->measured_ms}};
    return result;
}

void Admission::add_outlook(const Replica& replica, json::object& row) const {
    const memory::ReplicaId who = id_of(replica);
    row["pinned"] = policy_->is_pinned(who.model);
    row["waiting"] = policy_->waiting(who.model);
    const auto left = policy_->unload_at(who);
    row["unload_at"] = nullptr;
    if (left)
        row["unload_at"] =
            unix_ms() + std::chrono::duration_cast<memory::Millis>(*left - Deadline::Clock::now()).count();
}

json::array Admission::ledger() const {
    json::array devices;
    if (planned_.empty()) return devices;
    std::map<memory::DeviceId, json::array> workers;
    for (const memory::Holding& one : policy_->holdings()) {
        const auto add = [&](const memory::DeviceId& device, memory::Bytes bytes) {
            if (bytes == 0) return;
            workers[device].push_back(json::object{{"model", one.who.model},
                                                   {"replica", one.who.replica},
                                                   {"holds", memory::to_string(one.holds)},
                                                   {"bytes", bytes}});
        };
        add(one.device, one.device_bytes);
        if (one.device != memory::host) add(memory::DeviceId{memory::host}, one.host_bytes);
    }
    for (const memory::DeviceLedger& one : policy_->ledger())
        devices.push_back(json::object{{"device", devices_.at(one.id).text},
                                       {"uuid", one.id},
                                       {"total", one.total},
                                       {"limit", one.limit},
                                       {"margin", one.margin},
                                       {"foreign", one.foreign},
                                       {"reserved", one.reserved},
                                       {"resident", one.resident},
                                       {"reclaiming", one.reclaiming},
                                       {"mapped", one.mapped},
                                       {"blanks", blanks_.bytes(one.id)},
                                       {"workers", std::move(workers[one.id])}});
    return devices;
}

}  // namespace bulkhead::supervisor
