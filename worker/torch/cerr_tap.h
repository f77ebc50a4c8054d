#pragma once

#include <string>

namespace bulkhead::worker {

/// Listens to std::cerr, which goes on to its target. For AOTInductor: a compiled model that throws prints its
/// words there, and returns no more than a number.
///
/// Thread  `clear` and `text` on any; writers to std::cerr are serialised
class CerrTap {
public:
    /// The process' only one, installed by the first call and never removed.
    static CerrTap& instance();

    void clear();
    /// The last 16 KiB written since `clear`.
    [[nodiscard]] std::string text() const;

private:
    CerrTap();
    class Tee;
    Tee* tee_;  ///< lives as long as std::cerr, which may be written to while the process ends
};

}  // namespace bulkhead::worker
