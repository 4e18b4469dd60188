// A C interface, for ctypes, to a GapDetector that is compiled from a changed source (test_gap_detector_search.py).
#include <netfold/protocol/gap_detector.hpp>

using netfold::protocol::GapDetector;

extern "C" {
void* gap_detector_new() { return new GapDetector(); }
void* gap_detector_copy(void* self) { return new GapDetector(*static_cast<GapDetector*>(self)); }
void gap_detector_delete(void* self) { delete static_cast<GapDetector*>(self); }
int gap_detector_equal(void* self, void* other) { return *static_cast<GapDetector*>(self) == *static_cast<GapDetector*>(other); }
void gap_detector_observe(void* self, std::uint64_t packet_number, std::uint64_t* first, std::uint32_t* count) {
  const GapDetector::Gap gap = static_cast<GapDetector*>(self)->observe(packet_number);
  *first = gap.first;
  *count = gap.count;
}
}
