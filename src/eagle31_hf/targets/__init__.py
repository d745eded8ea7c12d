"""Everything that touches a target model: its layers, its forward, verification, the self-test."""
