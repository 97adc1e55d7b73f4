#pragma once

#include "offload/disturb.h"

/// While an object of this class exists, transfers of swap files are delayed, split or made to fail, as the
/// argument says.
struct Disturbed {
  explicit Disturbed(const shoestring::offload::io::Disturbance& d) { shoestring::offload::io::disturb(d); }
  ~Disturbed() { shoestring::offload::io::disturb({}); }
};
